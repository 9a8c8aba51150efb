"""The package's shape: who may import whom, from whom, and how long a module may be."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import outbox

PACKAGE = Path(outbox.__file__).parent
ROOT = PACKAGE.parent

# From the bottom up. A module imports its own layer and lower ones, and never in a circle.
LAYERS = [
    {
        "exceptions",
        "conf",
        "signals",
        "retries",
        "payloads",
        "database",
        "fields",
        "isolation",
        "texts",
        "errors",
        "redaction",
        "version",
        "inserting",
    },
    {"models", "handlers", "registry", "wakeup", "listening"},
    {"lanes", "intents"},
    {"leases", "operations", "retention"},
    {"delivery", "calls", "verdicts", "heartbeat", "outages", "registration", "overview"},
    {
        "staging",
        "recording",
        "durable",
        "slots",
        "queues",
        "wants",
        "ready",
        "plans",
        "appetite",
        "breakers",
        "solitude",
        "workers",
        "settler",
        "housekeeping",
        "schema",
        "vitals",
        "health",
        "limits",
        "dispatcher",
        "crew",
        "lifeline",
        "offspring",
        "posts",
        "supervisor",
        "probes",
        "checks",
        "explain",
    },
    {"apps", "admin", "testing", "pytest_plugin", "management", "logs", "migrations"},
    {""},  # outbox/__init__.py: the public names
]
# Optional: imported by nobody, and the only ones that may need more than Django.
LEAVES = {"sinks", "instrumentation"}
FURTHER_PACKAGES = {"pytest_plugin": {"pytest"}}
LINES = 300

RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
RANKS |= dict.fromkeys(LEAVES, len(LAYERS))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module):
    """Return which part of the package a module belongs to: "models", "sinks", ..."""
    return module.split(".")[1] if "." in module else ""


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def import_statements(tree):
    """Yield every import that runs, deferred ones included; those for types alone never do."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_type_checking(node):
            for branch in node.orelse:
                yield from import_statements(branch)
        else:
            yield from import_statements(node)


def imported_modules(module):
    """Return the absolute names of the modules that a module of the package imports."""
    path = MODULES[module]
    found = set()
    for node in import_statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        assert node.level == 0, f"{path}:{node.lineno} imports relatively"
        names = {f"{node.module}.{alias.name}" for alias in node.names}
        submodules = names & MODULES.keys()
        found |= submodules
        if submodules != names:
            found.add(node.module)
    return found


def own_imports(module):
    return {name for name in imported_modules(module) if name.split(".")[0] == "outbox"}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_layer(module):
    assert part_of(module) in RANKS, f"{module} has no layer: give it one in LAYERS, as low as what it imports allows."


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_no_higher_layer(module):
    rank = RANKS[part_of(module)]
    higher = {name for name in own_imports(module) if RANKS[part_of(name)] > rank}
    assert not higher


def test_no_modules_import_one_another_in_a_circle():
    # Django's app registry, not an import, ties a package of commands or migrations together.
    graph = {module: own_imports(module) - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("module", MODULES)
def test_nothing_outside_imports_an_optional_part(module):
    part = part_of(module)
    foreign = {name for name in own_imports(module) if part_of(name) in LEAVES and part_of(name) != part}
    assert not foreign


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name) not in LEAVES])
def test_the_core_needs_only_django_and_the_standard_library(module):
    allowed = {"django", "asgiref", "outbox", *FURTHER_PACKAGES.get(part_of(module), ())}
    tops = {name.split(".")[0] for name in imported_modules(module)}
    assert tops - allowed <= sys.stdlib_module_names


@pytest.mark.parametrize("module", [name for name in MODULES if part_of(name) != "migrations"])
def test_a_module_stays_short(module):
    length = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert length <= LINES, f"{module} has {length} lines: which of its two jobs leaves?"


def test_all_public_names_exist():
    assert len(set(outbox.__all__)) == len(outbox.__all__)
    missing = {name for name in outbox.__all__ if not hasattr(outbox, name)}
    assert not missing


def test_all_names_without_an_underscore_are_public():
    found = {
        name
        for name, value in vars(outbox).items()
        if not name.startswith("_") and getattr(value, "__module__", "").split(".")[0] == "outbox"
    }
    assert found <= set(outbox.__all__)


def test_importing_the_package_needs_no_settings_and_loads_no_models():
    script = (
        "import sys, outbox\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
        "assert not [name for name in sys.modules if name.startswith('outbox.models')]\n"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
