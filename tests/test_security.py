"""Nothing that is stored can run code, and no failure of a database gives its credentials away."""

import ast
import socket
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

import outbox
from outbox.handlers import registry
from outbox.models import Message
from outbox.overview import aliases
from outbox.testing import drain
from tests import rows
from tests.waiting import wait_until

PACKAGE = Path(outbox.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

RUNS_DATA = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "jsonpickle",
    "code",
    "codeop",
    "runpy",
    "imp",
    "ctypes",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
IMPORTERS = {"import_module", "import_string", "find_spec", "exec_module"}
# Each imports what the code or the settings name, never what a row says.
MAY_IMPORT = {
    "__init__.py": "its own modules, when a public name is first used",
    "pytest_plugin.py": "the testing kit, once Django is set up",
    "redaction.py": "the function that the settings name",
}
PASSWORD = "s3cret-Pa55"


# --- what is stored ---------------------------------------------------------------------------------------------------


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def bare_calls(tree):
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]


@pytest.mark.parametrize("name", SOURCES)
def test_no_module_can_run_what_is_stored(name):
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    assert not RUNS_DATA & set(imports(tree))
    assert not BUILTINS & bare_calls(tree)
    assert name in MAY_IMPORT or not IMPORTERS & set(calls(tree))


def test_the_list_of_modules_that_import_by_name_is_true():
    found = {name for name, path in SOURCES.items() if IMPORTERS & set(calls(ast.parse(path.read_text("utf-8"))))}
    assert found == set(MAY_IMPORT)


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["os.system", "builtins.print", "tests.test_security.trap", "outbox.testing.drain"])
def test_a_name_that_is_stored_is_only_ever_looked_up_in_the_registry(name, admin_client):
    with registry.isolated():
        row = rows.message(topic=name, handler=name, route=name, payload={"__reduce__": [name, ["x"]]})
        assert drain().processed == 0
        page = admin_client.get(f"/admin/outbox/message/{row.pk}/change/").content.decode()
    assert "nobody here takes it" in page
    assert Message.objects.get(pk=row.pk).attempt == 0
    assert not trapped


trapped = []


def trap(message):
    trapped.append(message)


def test_all_modules_write_to_the_one_logger_that_masks():
    """A filter holds for its logger only."""
    found = {
        ast.unparse(node)
        for path in SOURCES.values()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "getLogger"
    }
    assert found == {"logging.getLogger('outbox')"}


# --- credentials ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def closed_port():
    with socket.socket() as held:  # bound and not listening: refused, and nobody else can take it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def scheme(database_kind):
    if database_kind == "sqlite":
        pytest.skip("SQLite knows no login")
    return settings.DATABASE_URL.split(":")[0]


def unreachable(scheme, port):
    return f"{scheme}://app:{PASSWORD}@127.0.0.1:{port}/shop"


def refused_login(scheme):
    """The server of this run, with a login that it does not know."""
    address = settings.DATABASE_URL.split("@")[-1]
    return f"{scheme}://nobody-of-that-name:{PASSWORD}@{address}"


@pytest.mark.parametrize(
    "command",
    [
        ["outbox_status"],
        ["outbox_status", "--format", "json"],
        ["outbox_show", "1"],
        ["outbox_explain", "1"],
        ["outbox_requeue", "1"],
        ["outbox_prune"],
        ["check", "--database", "default"],
    ],
    ids=" ".join,
)
def test_a_database_that_cannot_be_reached_gives_no_credential_away(command, spawn, scheme, closed_port):
    url = unreachable(scheme, closed_port)
    process = spawn(*command, environment={"DATABASE_URL": url, "OTHER_DATABASE_URL": url})
    process.wait(60)
    assert PASSWORD not in process.output()
    if command[0] != "check":  # which leaves it to others to say that there is no database
        assert str(closed_port) in process.output() or "127.0.0.1" in process.output()


def test_the_status_of_other_databases_gives_no_credential_away(spawn, scheme, closed_port):
    for form in ("text", "json"):
        process = spawn(
            "outbox_status", "--format", form, environment={"OTHER_DATABASE_URL": unreachable(scheme, closed_port)}
        )
        assert process.wait(60) == 0
        assert "127.0.0.1" in process.output()
        assert PASSWORD not in process.output()


def test_a_dispatcher_that_waits_for_its_database_gives_no_credential_away(spawn, scheme, closed_port):
    url = unreachable(scheme, closed_port)
    process = spawn("outbox_dispatch", environment={"DATABASE_URL": url, "OTHER_DATABASE_URL": url})
    wait_until(lambda: "is away" in process.output() or process.poll() is not None, 60)
    process.terminate()
    process.wait(60)
    assert "127.0.0.1" in process.output()
    assert PASSWORD not in process.output()


def test_a_refused_login_gives_no_credential_away(spawn, scheme):
    url = refused_login(scheme)
    process = spawn("outbox_status", environment={"DATABASE_URL": url, "OTHER_DATABASE_URL": url})
    assert process.wait(60) != 0
    assert "nobody-of-that-name" in process.output()
    assert PASSWORD not in process.output()


@pytest.mark.django_db
def test_a_server_whose_text_quotes_the_password_is_masked_all_the_same():
    """Drivers and proxies word their errors as they like."""

    def refuse(execute, sql, params, many, context):
        raise OperationalError(f"cannot open postgres://app:{PASSWORD}@db/shop")

    with connection.execute_wrapper(refuse):
        (other,) = aliases(["default"])
        with pytest.raises(CommandError, match=r"postgres://app:\*\*\*@db/shop") as caught:
            call_command("outbox_status")
    assert "postgres://app:***@db/shop" in other.error
    assert PASSWORD not in str(caught.value) + other.error
