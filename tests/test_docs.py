"""The documentation is true: examples run or parse, reference pages are complete, promises name their tests."""

import argparse
import ast
import configparser
import dataclasses
import doctest
import functools
import inspect
import json
import re
import shlex
import sys
import tomllib
import types
import unittest
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from unittest import mock

import pytest
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.dispatch import Signal
from django.test import SimpleTestCase

import outbox
from outbox import checks, conf, exceptions, models, signals, testing
from outbox.admin import messages as message_admin
from outbox.admin import places, search
from outbox.handlers import Envelope, handler, registry
from outbox.management.commands import outbox_status
from outbox.retries import RetryPolicy
from tests.documents import ROOT, all_pages, names, page, rows
from tests.testapp.models import Order

PAGES = all_pages()
COMMANDS = sorted(name for name, app in get_commands().items() if name.startswith("outbox_"))
# Programs that stand in console blocks beside manage.py; the first word, or its last part.
PROGRAMS = {"python3", "python", "pip", "pytest", "ruff", "mypy", "sphinx-build", "django-admin", "systemctl"}
PROGRAMS |= {".", "mkdir", "mv", "cat", "sleep"}
# Mistakes of an example, as against failures that it means to show.
MISTAKES = (NameError, AttributeError, TypeError, ImportError, SyntaxError, LookupError)


# --- examples ---------------------------------------------------------------------------------------------------------


def pages_with(*languages):
    return [each for each in PAGES if any(block.language in languages for block in each.blocks)]


def by_name(pages):
    return [pytest.param(each, id=each.name) for each in pages]


@pytest.fixture(scope="module")
def warehouse():
    """A web service that accepts everything."""

    class Service(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class Shop:
    """The app ``shop`` that the examples assume; a page defines its modules, or finds stand-ins."""

    def __init__(self, patch):
        self.patch = patch
        self.package = types.ModuleType("shop")
        self.package.__path__ = []
        patch.setitem(sys.modules, "shop", self.package)
        self.add("models", types.SimpleNamespace(Order=Order))
        self.add("gateway", mock.Mock())
        self.add("tasks", mock.Mock())

    def add(self, name, module):
        self.patch.setitem(sys.modules, f"shop.{name}", module)
        setattr(self.package, name, module)


@pytest.fixture
def shop(monkeypatch, settings, warehouse):
    settings.WAREHOUSE_URL = warehouse
    settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}  # from Django 6.1 on
    return Shop(monkeypatch)


@pytest.fixture
def receivers():
    """Take away the receivers that an example connects."""
    every = [value for value in vars(signals).values() if isinstance(value, Signal)]
    before = [list(signal.receivers) for signal in every]
    yield
    for signal, kept in zip(every, before, strict=True):
        signal.receivers = kept
        signal.sender_receivers_cache.clear()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
@pytest.mark.usefixtures("receivers")
@pytest.mark.parametrize("page", by_name(each for each in pages_with("python", "pycon") if "tutorial" not in each.name))
def test_the_python_examples_of_a_page_run_in_their_order(page, shop, request):
    with registry.isolated():
        namespace = {"__name__": "shop.examples"}
        for block in page.blocks:
            if block.language == "python":
                run(page, block, namespace, shop)
            elif block.language == "pycon":
                converse(page, block, namespace)
        assert not registry.duplicates
        for using in ("default", "other"):
            mistakes = [e for e in testing.drain(using=using).errors.values() if isinstance(e, MISTAKES)]
            assert not mistakes
        call_tests(namespace, request)


def run(page, block, namespace, shop):
    """Execute a block. One that begins with the path of a module in ``shop`` is that module from then on."""
    code = compile("\n" * block.line + block.body, str(page.path), "exec")
    if match := re.match(r"# shop/(\w+)\.py", block.body):
        module = types.ModuleType(f"shop.{match[1]}")
        shop.add(match[1], module)
        exec(code, module.__dict__)
        namespace.update((name, value) for name, value in vars(module).items() if not name.startswith("__"))
    else:
        exec(code, namespace)
    if "OUTBOX" in namespace:
        assert conf.problems_of(namespace.pop("OUTBOX")) == []


def converse(page, block, namespace):
    """Compare what an interactive session prints; … stands for anything."""
    text = block.body.replace("…", "...")
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL * ("…" not in block.body)
    test = doctest.DocTestParser().get_doctest(text, namespace, page.name, str(page.path), block.line)
    test.globs = namespace
    printed = []
    assert not doctest.DocTestRunner(optionflags=flags).run(test, out=printed.append, clear_globs=False).failed, (
        "".join(printed)
    )


def call_tests(namespace, request):
    """Run the tests that a page shows: functions with the fixtures they ask for, and cases of Django's."""
    for name, value in list(namespace.items()):
        if name.startswith("test_") and inspect.isfunction(value):
            models.Message.objects.all().delete()
            with pytest.MonkeyPatch.context() as patch:
                given = {
                    each: patch if each == "monkeypatch" else request.getfixturevalue(each)
                    for each in inspect.signature(value).parameters
                }
                if "mailoutbox" in given:
                    given["mailoutbox"].clear()
                value(**given)
        elif isinstance(value, type) and issubclass(value, SimpleTestCase) and value.__module__.startswith("shop."):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(value).run(result)
            assert result.testsRun > 0
            assert result.wasSuccessful(), result.errors + result.failures


@pytest.mark.parametrize("page", by_name(pages_with("console")))
def test_every_command_of_a_page_is_accepted_by_its_parser(page):
    for block in page.blocks:
        if block.language == "console":
            assert block.body.startswith("$ "), f"{page.name}:{block.line}: a console block shows commands after $"
            for line in re.findall(r"^\$ (.+)$", block.body, re.MULTILINE):
                accept(line)


def accept(line):
    """Parse each command of a shell line."""
    words = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
    words.whitespace_split = True
    command = []
    for word in [*words, "&&"]:
        if set(word) <= set("&|;<>"):
            accept_words(command)
            command = []
        else:
            command.append(word)


def accept_words(words):
    words = words[next(i for i, word in enumerate(words) if "=" not in word) :]
    program = words[0].rsplit("/", 1)[-1]
    assert program in PROGRAMS, words
    if "manage.py" in words[1:2]:
        accept_management(words[2:])
    elif program == "django-admin":
        accept_management(words[1:])
    elif program == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).exists(), words


def accept_management(words):
    name, *arguments = words
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    try:
        parser.parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{shlex.join(words)} is refused")


@pytest.mark.parametrize("page", by_name(pages_with("ini", "yaml", "json", "toml")))
def test_every_configuration_file_of_a_page_parses(page):
    for block in page.blocks:
        match block.language:
            case "ini":
                units = configparser.ConfigParser(interpolation=None, strict=True)
                units.optionxform = str
                units.read_string(block.body)
                accept(units["Service"]["ExecStart"])
            case "yaml":
                for line in re.findall(r"command: (\[.*\])$", block.body, re.MULTILINE):
                    accept(shlex.join(json.loads(line)))
                if yaml := sys.modules.get("yaml") or _optional("yaml"):
                    assert yaml.safe_load(block.body)
            case "json":
                json.loads(block.body)
            case "toml":
                tomllib.loads(block.body)


def _optional(name):
    try:
        return __import__(name)
    except ImportError:  # comes with what builds the documentation, not with the tests
        return None


@pytest.mark.parametrize("page", by_name(PAGES))
def test_every_block_of_a_page_says_what_it_is(page):
    known = {"python", "pycon", "console", "ini", "yaml", "json", "toml", "sql", "text", "step"}
    for block in page.blocks:
        assert block.language in known or block.language.startswith("{"), f"{page.name}:{block.line}"


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", by_name(PAGES))
def test_every_link_of_a_page_leads_somewhere(page):
    for target in page.links():
        path, _, anchor = target.partition("#")
        there = next((each for each in PAGES if each.path == (page.path.parent / path).resolve()), None)
        assert there or (page.path.parent / path).exists(), f"{page.name}: {target}"
        if anchor:
            assert there, f"{page.name}: {target}"
            assert anchor in anchors(there), f"{page.name}: {target}"


def anchors(page):
    found = {
        re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for level in (1, 2, 3) for each in page.headings(level)
    }
    return found | set(re.findall(r"^\((\S+)\)=$", page.text, re.MULTILINE))


@pytest.mark.parametrize("page", by_name(each for each in PAGES if each.tests()))
def test_every_test_that_a_page_names_exists(page):
    missing = [each for each in page.tests() if not exists(each)]
    assert not missing


@functools.cache
def tree(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def exists(node_id):
    path, *parts = node_id.split("::")
    if not (ROOT / path).exists():
        return False
    body = tree(path).body
    for part in parts:
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            return False
        body = found[0].body
    return True


def test_every_promise_names_its_test():
    promises = page("docs/explanation/guarantees.md").section("What is promised")
    items = re.findall(r"^- (.+?)(?=^- |^#|^\n|\Z)", promises, re.MULTILINE | re.DOTALL)
    assert len(items) > 20
    assert [item for item in items if "tests/" not in item] == []


# --- reference pages are complete -------------------------------------------------------------------------------------


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind != each.VAR_KEYWORD}


def documented_defaults(text):
    """Name -> default of each row; the default is Python, or empty for none."""
    return {
        row[0].strip("`"): ast.literal_eval(row[1].strip("`")) if row[1] else inspect.Parameter.empty
        for row in rows(text)
    }


def test_the_settings_page_lists_every_option_with_its_default():
    written = {
        name.strip("`"): ast.literal_eval(default.strip("`"))
        for name, default, _ in rows(page("docs/reference/settings.md").text)
    }
    assert written == dataclasses.asdict(conf.Options())


def test_the_checks_page_has_a_section_for_every_id():
    there = page("docs/reference/checks.md")
    assert there.headings() == list(checks.CHECKS)
    for id_, title in checks.CHECKS.items():
        path, _, anchor = checks.anchor(id_).partition("#")
        assert path == there.name
        assert f"({anchor})=\n## {id_}\n" in there.text
        section = there.section(id_)
        assert section.strip().startswith(f"{title}."), id_
        assert "**Cause.**" in section, id_
        assert "**Way out.**" in section, id_


def test_the_signals_page_lists_every_signal_and_all_that_an_event_tells():
    there = page("docs/reference/signals.md")
    sent = [name for name, value in vars(signals).items() if isinstance(value, Signal)]
    assert names(there.text.split("## Event")[0]) == sent
    told = [field.name for field in dataclasses.fields(signals.Event)]
    assert names(there.section("Event")) == [*told, "died"]


def test_the_states_page_lists_every_state_place_reason_and_outcome():
    there = page("docs/reference/states.md")
    assert names(there.section("States")) == models.State.values
    assert names(there.section("Places of a pending message")) == [
        place.value for place in places.Place if place not in places.ENDS.values()
    ]
    assert names(there.section("Reasons")) == [value for value in models.Reason.values if value]
    assert names(there.section("Outcomes of an attempt")) == models.Outcome.values


def test_the_page_of_public_names_equals_all():
    assert sorted(names(page("docs/reference/public-names.md").text)) == sorted(outbox.__all__)


def test_the_commands_page_has_a_section_for_every_command():
    there = [heading for heading in page("docs/reference/commands.md").headings() if heading.startswith("outbox_")]
    assert sorted(there) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_the_commands_page_lists_every_option(name):
    common = {action.dest for action in BaseCommand().create_parser("manage.py", name)._actions}
    parser = load_command_class("outbox", name).create_parser("manage.py", name)
    expected = {
        (action.option_strings or [action.metavar])[0]
        for action in parser._actions
        if action.dest not in common and action.help != argparse.SUPPRESS
    }
    section = page("docs/reference/commands.md").section(name)
    first_table = section.split("\n\n`EXPR`")[0]
    assert {each.split(" ")[0] for each in names(first_table)} == expected


def test_the_commands_page_lists_every_measure():
    text = page("docs/reference/commands.md").section("outbox_status").split("`EXPR`")[1]
    assert set(names(text)) == set(outbox_status.MEASURES)


def test_the_handlers_page_lists_every_option_and_attribute():
    there = page("docs/reference/handlers.md")
    options = [name for name in defaults(handler) if name != "topic"]
    assert names(there.section("handler")) == options
    attributes = [field.name for field in dataclasses.fields(Envelope)]
    assert names(there.section("What a handler receives")) == attributes
    assert documented_defaults(there.section("RetryPolicy")) == defaults(RetryPolicy)


def test_the_staging_page_lists_every_argument_and_result():
    there = page("docs/reference/staging.md")
    assert documented_defaults(there.section("stage")) == defaults(outbox.stage) == defaults(outbox.astage)
    assert names(there.section("Staged")) == [field.name for field in dataclasses.fields(outbox.Staged)]
    results = [field.name for field in dataclasses.fields(outbox.PostCommitResult)]
    assert names(there.section("DurableCommand")) == results


def test_the_verdicts_page_lists_every_verdict():
    verdicts = {each.__name__ for each in exceptions.Verdict.__subclasses__()}
    text = page("docs/reference/verdicts.md").text
    assert {name for name in names(text) if name in verdicts} == verdicts


def test_the_testing_page_lists_every_function_option_and_fixture():
    there = page("docs/reference/testing.md")
    functions = {
        name
        for name, value in vars(testing).items()
        if inspect.isfunction(value) and value.__module__ == testing.__name__ and not name.startswith("_")
    }
    assert set(names(there.text.split("## drain")[0])) == functions
    assert documented_defaults(there.section("drain")) == defaults(testing.drain)
    assert set(names(there.section("Report"))) == {field.name for field in dataclasses.fields(testing.Report)} | {
        "processed"
    }
    fixtures = re.findall(r"^@pytest\.fixture\ndef (\w+)", (ROOT / "outbox/pytest_plugin.py").read_text(), re.MULTILINE)
    assert names(there.section("pytest fixtures")) == fixtures


def test_the_admin_page_lists_every_permission_verb_and_search_term():
    there = page("docs/reference/admin.md")
    own = {
        f"outbox.{codename}" for model in (models.Message, models.Breaker) for codename, _ in model._meta.permissions
    }
    assert set(names(there.section("Permissions"))) - own == {
        f"outbox.view_{model}" for model in ("message", "attempt", "dispatcher", "breaker")
    }
    verbs = {str(action.short_description) for action in message_admin.MessageAdmin.actions}
    assert {row[0].strip("*") for row in rows(there.section("Verbs"))} == verbs
    assert {name.split(":")[0] for name in names(there.section("The list"))} == set(search._MEANINGS)


def test_the_databases_page_names_the_oldest_supported_versions():
    from outbox.database import OLDEST

    table = {row[0].lower(): row[1] for row in rows(page("docs/reference/databases.md").section("Support"))}
    assert table == {kind: ".".join(map(str, version)) for kind, version in OLDEST.items()}
