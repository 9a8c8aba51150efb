"""The example project's settings, with two test databases on the server that DATABASE_URL names.

OTHER_DATABASE_URL   the alias "other"; the default database's URL with _other at its name's end
OUTBOX_TEST_SUFFIX   ends the names of the test databases, so that several runs share a server

A subprocess of a test is pointed straight at the test databases through the two URLs.
"""

import os
import tempfile
from pathlib import Path

from example_project.settings import *  # noqa: F403  (settings extend settings)
from example_project.settings import BASE_DIR, DATABASES, INSTALLED_APPS, database, env

DEBUG = False

DATABASE_URL = env.str("DATABASE_URL", default="") or f"sqlite:///{BASE_DIR}/db.sqlite3"
_address, _mark, _query = DATABASE_URL.partition("?")
OTHER_DATABASE_URL = env.str("OTHER_DATABASE_URL", default="") or f"{_address}_other{_mark}{_query}"
DATABASES["other"] = database(OTHER_DATABASE_URL)

# Files, not memory: the tests use threads and real processes. conftest.py makes the directory.
SQLITE_DIRECTORY = Path(tempfile.gettempdir()) / f"outbox-tests-{os.getpid()}"

_suffix = env.str("OUTBOX_TEST_SUFFIX", default="")
_name = f"test_outbox_{_suffix}" if _suffix else "test_outbox"
for _alias, _test_name in {"default": _name, "other": f"{_name}_other"}.items():
    _config = DATABASES[_alias]
    _is_sqlite = _config["ENGINE"] == "django.db.backends.sqlite3"
    _config["TEST"] = {"NAME": str(SQLITE_DIRECTORY / _test_name) if _is_sqlite else _test_name}
    if _config["ENGINE"] == "django.db.backends.mysql":
        _config["TEST"]["CHARSET"] = "utf8mb4"

INSTALLED_APPS = [*INSTALLED_APPS, "tests.testapp"]
MIGRATION_MODULES = {"testapp": None}

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
