"""What the drivers of all peers share: their arguments, their watch, and the report that the benchmark reads."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit


class Drive:
    """One run of a peer: so many messages of an empty database are staged one by one or at once, and then drained."""

    def __init__(self, settings: str) -> None:
        options = argparse.ArgumentParser(description="Stage no-op messages and drain them; prints seconds as JSON.")
        options.add_argument("--database", required=True, help="URL of an empty PostgreSQL database")
        options.add_argument("--messages", type=int, default=1000)
        options.add_argument("--only-stage", action="store_true", help="stop when all messages are staged")
        given = options.parse_args()
        self._only_stage: bool = given.only_stage
        self.url: str = given.database
        self.messages: int = given.messages
        self.handled = 0
        self.settings = settings
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        if name == "stage" and self._only_stage:
            self._print()
            raise SystemExit(0)

    def report(self) -> None:
        """Print the seconds, unless something else than the messages was handled."""
        if self.handled != self.messages:
            raise SystemExit(f"{self.handled} messages handled instead of {self.messages}.")
        self._print()

    def _print(self) -> None:
        print(json.dumps({"messages": self.messages, "settings": self.settings, **self.seconds}))

    def configure_django(self, *apps: str, **more: Any) -> None:
        """Set Django up on the database, and create the tables of these apps."""
        import django
        from django.conf import settings
        from django.core.management import call_command

        url = urlsplit(self.url)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url.path.lstrip("/"),
            "USER": url.username or "",
            "PASSWORD": url.password or "",
            "HOST": url.hostname or "",
            "PORT": url.port or "",
            "CONN_MAX_AGE": None,
        }
        settings.configure(
            DATABASES={"default": database},
            INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", *apps],
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            USE_TZ=True,
            **more,
        )
        django.setup()
        call_command("migrate", verbosity=0)
