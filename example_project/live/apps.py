"""Connects the mirror."""

from django.apps import AppConfig


class LiveConfig(AppConfig):
    name = "example_project.live"

    def ready(self) -> None:
        from example_project.live import mirror  # noqa: F401 - importing it connects it
