"""Every public failure that this project answers for is the subject of a test that names its number."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SCENARIOS = [*range(1, 65)]
FAULTS = [f"P{number}" for number in range(1, 15)]
NAMED = re.compile(r"\b[Ss]cenarios?\s+((?:P?\d+(?:\s*(?:,|and|-)\s*)?)+)")
FAULT = re.compile(r"\bP\d{1,2}\b")


def docstrings():
    """Yield the docstring of each test, and of each module and class that holds some."""
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_named and node.name.lower().startswith("test"):
                yield ast.get_docstring(node) or ""


@cache
def named():
    found = set()
    for text in docstrings():
        for numbers in NAMED.findall(text):
            found |= set(re.findall(r"P?\d+", numbers))
        found |= set(FAULT.findall(text))
    return found


@pytest.mark.parametrize("number", [*map(str, SCENARIOS), *FAULTS])
def test_a_test_names_this_scenario(number):
    assert number in named()
