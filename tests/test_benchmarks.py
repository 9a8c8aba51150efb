"""The benchmarks can be started; what they measure is not the matter of a test."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(each for each in BENCHMARKS.glob("*.py") if "__main__" in each.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", [each.name for each in SCRIPTS])
def test_a_benchmark_says_how_it_is_used(script):
    path = BENCHMARKS / script
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "--database" in run.stdout
    assert "--quick" in run.stdout
    assert "--json" in run.stdout


def test_every_peer_has_a_driver(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from peers import PEERS

    drivers = {each.stem for each in (BENCHMARKS / "peers").glob("on_*.py")}
    assert {f"on_{peer.driver}" for peer in PEERS} == drivers
    assert all("==" in peer.requirements[0] for peer in PEERS)
