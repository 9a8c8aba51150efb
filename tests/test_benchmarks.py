"""The benchmarks can be started; what they measure is not the matter of a test."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", [each.name for each in SCRIPTS if each.name != "ground.py"])
def test_a_benchmark_says_how_it_is_used(script):
    path = next(each for each in SCRIPTS if each.name == script)
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert "--database" in run.stdout
    assert "--quick" in run.stdout
