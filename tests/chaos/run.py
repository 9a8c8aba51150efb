"""One run from the empty server to the verdict."""

import json
import os
from contextlib import contextmanager
from dataclasses import asdict

import django
from django.core.management import call_command
from django.db import connection

from tests.chaos import evidence, journal, plan
from tests.chaos.troupe import FAKETIME
from tests.processes import servers

ROOM = {"postgres": ("-c", "max_connections=150"), "mariadb": ("--max-connections=150",)}


def run(terms, directory, say):
    """Let it happen; `judge` tells what came of it."""
    with database(terms, directory) as server:
        django.setup()
        from tests.chaos.conductor import Conductor  # deferred: needs Django

        call_command("migrate", run_syncdb=True, verbosity=0)
        connection.close()
        library = servers.library(FAKETIME) if terms.has_server else None
        codes, drained = Conductor(terms, server, directory, library, say).run()
        collect(terms, directory, codes, drained)


@contextmanager
def database(terms, directory):
    """A server of this run's own, or a file."""
    if not terms.has_server:
        os.environ["DATABASE_URL"] = f"sqlite:///{directory}/database"
        yield None
        return
    server = {"postgres": servers.PostgreSQL, "mariadb": servers.MariaDB}[terms.database]()
    try:
        server.room = ROOM[terms.database]
        server.stop()
        server.start(*server.room)
        os.environ["DATABASE_URL"] = server.url()
        yield server
    finally:
        server.remove()


def collect(terms, directory, codes, drained):
    """Put what the tables hold into a file beside the journal; moments become seconds."""
    from outbox.database import server_now
    from outbox.fields import from_micros
    from outbox.models import Attempt, Message
    from tests.testapp.models import Effect

    connection.close()  # the server has ended its session
    columns = [field.attname for field in Message._meta.fields if field.name not in ("payload", "headers", "digest")]
    tables = {
        "terms": asdict(terms),
        "messages": list(Message.objects.order_by("id").values(*columns)),
        "attempts": list(Attempt.objects.order_by("id").values()),
        "effects": list(Effect.objects.values("key", "attempt")),
        "now": from_micros(server_now("default")),
        "drained": drained,
        "codes": codes,
    }
    (directory / journal.TABLES).write_text(json.dumps(tables, default=lambda instant: instant.timestamp()))


def judge(agreed, directory, say):
    """Check what a run has left in its directory; returns the figures, and by claim its violations."""
    from tests.chaos import checker, figures  # deferred: the invariants need Django

    tables = json.loads((directory / journal.TABLES).read_text()) | {"terms": agreed}
    lines = journal.read(directory / journal.LINES)
    found = evidence.Evidence(planned=plan.make(agreed).drafts(), lines=lines, **tables)
    violations = checker.check(found)
    numbers = figures.figures(found)
    for line in figures.table(numbers, violations):
        say(line)
    return numbers, violations
