"""A service for AI jobs: what was ordered is dispatched into a job queue."""
