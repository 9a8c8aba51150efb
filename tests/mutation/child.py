"""One run of the chosen tests in a scratch copy of the repository, in a process of its own."""

import os
import sys
import threading
from collections import defaultdict
from pathlib import Path


def play(answer, directory, environment, files, order=None, traced=None):
    """Run tests until the first failure and send what was seen.

    ``order``: the ids of the tests to run, in this order (default: all of the files). ``traced``: sources of which the
    lines that each test runs are noted.
    """
    directory = str(directory)
    os.chdir(directory)
    os.environ.update(environment)
    sys.path.insert(0, directory)
    sys.argv[:] = ["pytest"]
    log = os.open("mutation.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = traced is None  # a mutant must not be found compiled by the next one

    import pytest

    recorder = Recorder({str(Path(directory, name)): name for name in traced or ()})
    plugins = [recorder, Order(order)] if order is not None else [recorder]
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=45"]
    status = pytest.main([*options, *files], plugins=plugins)
    import outbox

    assert outbox.__file__.startswith(directory), outbox.__file__
    answer.send((int(status), recorder.failed, recorder.seconds, dict(recorder.lines)))


class Order:
    """Runs the named tests only, in the order of their names."""

    def __init__(self, names):
        self.place = {name: number for number, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.place), key=lambda item: self.place[item.nodeid]
        )


class Recorder:
    """Notes how long each test takes, which one fails first, and which lines of the traced sources it runs."""

    def __init__(self, traced):
        self.traced = traced
        self.failed = ""
        self.seconds = defaultdict(float)
        self.lines = defaultdict(set)
        self._now = set()

    def pytest_runtest_logstart(self, nodeid):
        self._now = self.lines[nodeid]
        if self.traced:
            sys.settrace(self._enter)
            threading.settrace(self._enter)

    def pytest_runtest_logfinish(self):
        sys.settrace(None)
        threading.settrace(None)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"

    def _enter(self, frame, event, argument):
        return self._line if frame.f_code.co_filename in self.traced else None

    def _line(self, frame, event, argument):
        self._now.add((self.traced[frame.f_code.co_filename], frame.f_lineno))
        return self._line
