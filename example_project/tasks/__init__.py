"""A video tool: its events are relayed into a task engine."""
