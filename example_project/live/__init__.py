"""The front page, and deliveries shown live: what was delivered anywhere is mirrored to every open page."""
