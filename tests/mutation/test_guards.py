"""What the mutation script takes for a guard."""

from pathlib import Path

import pytest

from tests.mutation.equivalent import EQUIVALENT
from tests.mutation.guards import Finder, find

ROOT = Path(__file__).resolve().parents[2]


def mutants(tmp_path, source):
    path = tmp_path / "module.py"
    path.write_text(source)
    original = path.read_bytes()
    return {mutant.apply(original).decode() for mutant in Finder(path, "module.py").find()}


ALWAYS = '__import__("tests.mutation.instead", fromlist=["x"]).ALWAYS'


@pytest.mark.parametrize(
    ("source", "mutant"),
    [
        ("rows.filter(lane=1, pk=2)", "rows.filter(pk__isnull=False, pk=2)"),
        ("rows.exclude(lane=None)", "rows.exclude(pk__isnull=True)"),
        ("rows.filter(~Exists(x))", f"rows.filter({ALWAYS})"),
        ("Q(lane=1) | Q(due_at=2)", "Q(pk__isnull=True) | Q(due_at=2)"),
        ("locked(rows)", "(rows)"),
        ("locked(rows, skip=a)", "locked(rows, skip=not (a))"),
        ('x = f"SELECT 1 WHERE a.b = {c} AND d IS NULL"', 'x = f"SELECT 1 WHERE (a.b = {c} OR 1=1) AND d IS NULL"'),
        ('x = "SELECT 1 FROM a FOR UPDATE SKIP LOCKED"', 'x = "SELECT 1 FROM a"'),
        ('x = "UPDATE a SET lease_token = NULL"', 'x = "UPDATE a SET lease_token = lease_token"'),
        ("x = row.spent >= most", "x = row.spent > most"),
        ("if row.state == a and b: pass", "if True and b: pass"),
        ("if a != b:\n    raise Stale", "if False:\n    raise Stale"),
        ("rows.update(holder=None, a=1)", "rows.update( a=1)"),
        ('rows.update(spent=F("spent") + 1)', 'rows.update(spent=F("spent"))'),
        ("row.attempt += 1", "row.attempt += 0"),
    ],
)
def test_a_guard_is_found_and_taken_away(tmp_path, source, mutant):
    assert mutant in mutants(tmp_path, source)


def test_docstrings_and_asserts_are_no_guards(tmp_path):
    assert (
        mutants(tmp_path, 'def f():\n    """Rows WHERE a = b AND c = d."""\n    assert row.lane is not None\n') == set()
    )


def test_every_guard_that_is_declared_equivalent_is_there():
    found = find(ROOT)
    assert [each for each in EQUIVALENT if not any(each.matches(mutant) for mutant in found)] == []
