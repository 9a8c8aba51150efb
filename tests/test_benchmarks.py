"""The benchmarks can be started; what they measure is not the matter of a test."""

import importlib
import json
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


@pytest.fixture
def ground(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("ground")


def test_a_broken_limit_is_named_by_the_last_line(ground, capsys, tmp_path):
    sheet = ground.Sheet()
    sheet.ratio("ours / theirs", [1.0, 1.2, 1.4], [2.0, 2.0, 2.0])
    sheet.demand("ours / theirs", at_least=0.7)
    assert sheet.close(str(tmp_path / "numbers.json")) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Falls short: ours / theirs is 0.600, should be at least 0.700"
    assert json.loads((tmp_path / "numbers.json").read_text(encoding="utf-8")) == {"ours / theirs": 0.6}


def test_a_quick_run_is_measured_by_wider_limits(ground, capsys):
    sheet = ground.Sheet(quick=True)
    sheet.note("share", 0.6)
    sheet.note("claim", 7.0, "ms")
    sheet.demand("share", at_least=0.8)
    sheet.demand("claim", at_most=5.0)
    assert sheet.close(None) == 0
    sheet.demand("share", at_least=1.0)
    assert sheet.close(None) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("Falls short: share")


def test_a_peer_that_cannot_be_installed_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers

    def with_this_interpreter(home, **options):
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(peers, "CACHE", tmp_path)
    monkeypatch.setattr(peers.venv, "create", with_this_interpreter)
    nobody = peers.Peer(name="nobody", driver="nobody", requirements=("/nowhere/nobody",), messages=1, faster=1)
    with pytest.raises(SystemExit, match="nobody cannot be installed"):
        nobody.interpreter()
