"""Small apps that show how the outbox is used; also what its tests run in."""
