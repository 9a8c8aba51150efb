"""What every test may use: the kind of database, a second connection, real processes."""

import os
import random
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from django.apps import apps
from django.conf import settings
from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.db import connections, transaction
from django.test import TransactionTestCase

from outbox.database import can_listen, direct
from outbox.retries import RetryPolicy

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "outbox"
# "postgresql", "mysql" or "sqlite": a run meant for that database cannot pass on another.
EXPECTED_DATABASE = os.environ.get("OUTBOX_EXPECT_DATABASE")


def pytest_configure(config):
    settings.SQLITE_DIRECTORY.mkdir(exist_ok=True)
    if not config.pluginmanager.hasplugin(PLUGIN) and find_spec("outbox.pytest_plugin"):
        # Run from the source tree, without the entry point that an installation brings.
        config.pluginmanager.register(import_module("outbox.pytest_plugin"), PLUGIN)
    vendor = connections["default"].vendor
    if EXPECTED_DATABASE and vendor != EXPECTED_DATABASE:
        raise pytest.UsageError(f"{EXPECTED_DATABASE} is expected, but DATABASE_URL names {vendor}.")


def pytest_unconfigure():
    shutil.rmtree(settings.SQLITE_DIRECTORY, ignore_errors=True)


def pytest_report_header():
    connection = connections["default"]
    return f"database: {connection.vendor}, {connection.settings_dict['TEST']['NAME']}"


@pytest.fixture(scope="session", autouse=True)
def _database_reached(request):
    """Fail everything, the tests without a database too, when the expected server is away."""
    if EXPECTED_DATABASE:
        request.getfixturevalue("django_db_setup")


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    """Let the test databases of a PostgreSQL server commit without waiting for the disk, in every process."""
    with django_db_blocker.unblock():
        for connection in connections.all():
            config = connection.settings_dict
            is_made = config["NAME"] == config["TEST"]["NAME"]  # for the tests chosen, which may need one alias only
            if is_made and connection.vendor == "postgresql":
                name = connection.ops.quote_name(config["NAME"])
                with connection.cursor() as cursor:
                    cursor.execute(f"ALTER DATABASE {name} SET synchronous_commit TO off")
                connection.close()


@pytest.fixture(scope="session", autouse=True)
def _quick_cleaning():
    """Empty the tables after a transactional test with DELETE, and keep the content types and the connection.

    Django truncates and then creates content types and permissions anew: a quarter of a second on PostgreSQL,
    ten times what the DELETEs take. And it opens a connection for each test, where the server reads its catalogs again.
    """
    kept = {ContentType, Permission}
    models = [model for model in apps.get_models(include_auto_created=True) if model not in kept]

    def delete_rows(case):
        for alias in case._databases_names(include_mirrors=False):
            connection = connections[alias]
            deletes = [f"DELETE FROM {connection.ops.quote_name(model._meta.db_table)}" for model in models]
            if connection.vendor == "postgresql":  # which takes them all at once
                deletes = ["; ".join(deletes)]
            with (
                connection.constraint_checks_disabled(),
                transaction.atomic(using=alias),
                connection.cursor() as cursor,
            ):
                for delete in deletes:
                    cursor.execute(delete)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", delete_rows)
        patch.setattr(TransactionTestCase, "_should_reload_connections", lambda case: False)
        yield


class LaterHalf:
    """Draws from the later half only: full jitter may make a message due again at once, within the same drain."""

    def random(self):
        return (1 + random.random()) / 2


@pytest.fixture(scope="session", autouse=True)
def _no_retry_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RetryPolicy.delay, "__defaults__", (LaterHalf(),))
        yield


@pytest.fixture(scope="session")
def database_kind():
    """Return "sqlite", "postgresql" or "mysql" (which MariaDB is, too)."""
    return connections["default"].vendor


PATHS = ["the driver's cursor", "Django's cursor"] if can_listen(connections["default"]) else ["Django's cursor"]


@pytest.fixture(params=PATHS)
def statement_path(request, monkeypatch):
    """Run the test once for each cursor that staging may take on this database."""
    if request.param == "Django's cursor":
        monkeypatch.setattr(direct, "is_unobserved", lambda connection: False)
    return request.param


@pytest.fixture
def alias():
    """Return a function that adds an alias of the test database with other settings, for this thread and test."""
    added = []

    def add(name, **options):
        connections[name] = connections["default"].copy(name)
        connections[name].settings_dict["OPTIONS"].update(options)
        connections[name].settings_dict["CONN_MAX_AGE"] = 0  # as a pool demands
        added.append(name)
        return connections[name]

    yield add
    for name in added:
        connections[name].close()
        if connections[name].vendor == "postgresql":
            connections[name].close_pool()
        del connections[name]


@pytest.fixture
def second_connection(transactional_db):
    """Return a function that opens an independent connection to the test database.

    It may be used from any thread; what is still open at the end is closed here.
    """
    opened = []

    def open_connection(alias="default"):
        connection = connections.create_connection(alias)
        connection.inc_thread_sharing()
        opened.append(connection)
        return connection

    yield open_connection
    for connection in opened:
        connection.close()


def _test_database_url(alias):
    """Return the URL of the test database itself, as a subprocess needs it."""
    name = connections[alias].settings_dict["NAME"]
    if connections[alias].vendor == "sqlite":
        return f"sqlite:///{name}"
    url = settings.DATABASE_URL if alias == "default" else settings.OTHER_DATABASE_URL
    return urlsplit(url)._replace(path="/" + quote(name)).geturl()


@pytest.fixture
def process_environment(transactional_db):
    """Return the environment in which `manage.py` works on the test databases."""
    return {
        **os.environ,
        "DATABASE_URL": _test_database_url("default"),
        "OTHER_DATABASE_URL": _test_database_url("other"),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }


class ManagedProcess(subprocess.Popen):
    """A process whose output (both streams) goes to the file `log`."""

    def __init__(self, arguments, *, log, **options):
        self.log = log
        with log.open("wb") as stream:
            super().__init__(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                # A group of its own: a forced end takes its children along.
                start_new_session=True,
                **options,
            )

    def output(self):
        return self.log.read_text(errors="replace")


@pytest.fixture
def spawn(process_environment, tmp_path):
    """Return a function that starts `manage.py <arguments>` on the test databases.

    `environment` adds variables. What still runs at the end is killed, with its children.
    """
    processes = []

    def start(*arguments, environment=None):
        process = ManagedProcess(
            [sys.executable, str(ROOT / "manage.py"), *map(str, arguments)],
            log=tmp_path / f"process-{len(processes)}.log",
            env={**process_environment, **(environment or {})},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
