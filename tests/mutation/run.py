"""Take away one guard of the writers at a time, in a copy of the repository, and expect that a test fails.

    python tests/mutation/run.py [--database URL] [--only GLOB] [--kind KIND] [--left-by FILE] [--quick] [--list]

The guards are found by `guards`. Which tests can notice that one is gone is found out, too: a first run, in which
nothing is changed and all must pass, notes which test runs which line. Those of the guard's line are then run, the
quickest first, until one fails. A guard that nothing misses is listed at the end, and the exit code is 1.

On a server the guards that need one are reached, too: row locks, and statements of that database alone. So the whole is

    python tests/mutation/run.py | tee sqlite.log
    python tests/mutation/run.py --database postgres://… --left-by sqlite.log | tee postgresql.log
    python tests/mutation/run.py --database mysql://… --left-by postgresql.log
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from zlib import crc32

# Found beside this script, and not as tests.mutation: in a copy, `tests` must be the copy's.
from child import play
from equivalent import EQUIVALENT
from guards import find

ROOT = Path(__file__).resolve().parents[2]
COPIED = ["outbox", "tests", "example_project", "setup.cfg", "pyproject.toml", "manage.py"]
TESTS = [
    "tests/model",
    "tests/test_rechecks.py",
    "tests/test_leases.py",
    "tests/test_lanes.py",
    "tests/test_lists.py",
    "tests/test_floors.py",
    "tests/test_lapses.py",
    "tests/test_operations.py",
    "tests/test_retention.py",
    "tests/test_transactions.py",
    "tests/test_immediate.py",
    "tests/test_staging.py",
    "tests/test_staging_commit.py",
    "tests/test_staging_keys.py",
    "tests/test_staging_races.py",
    "tests/test_interleavings.py",
    "tests/test_courtesy.py",
]
# Hundreds of runs add up to many stories and interleavings; and a failure is enough, it need not be small.
ENVIRONMENT = {"OUTBOX_MODEL_EXAMPLES": "25", "OUTBOX_MODEL_SHRINK": "0", "OUTBOX_INTERLEAVING_SECONDS": "3"}
PRELOADED = ["django.db.models", "django.test"]  # by the process that all others are copied from
PATIENCE = 240.0  # seconds for the tests of one mutant; then they hang, and so they have noticed
LONG_PATIENCE = 1800.0  # for the first run
QUICK = 16  # one guard of so many, always the same ones, fits into every run
FEW = 5  # tests of a line; what they did may have been remembered for all others: then those of the whole file are run
FAVOURITES = 8  # tests that noticed most in this file so far, tried first


@dataclass(slots=True, kw_only=True)
class Verdict:
    """``fate``: "killed", "survived", "unreached", "equivalent", "needs row locks"."""

    mutant: object
    fate: str
    by: str = ""
    seconds: float = 0.0

    def __str__(self):
        return f"{self.fate:<10} {self.seconds:5.1f} s  {self.mutant}" + (f"\n{'':<21}by {self.by}" if self.by else "")


@dataclass(slots=True, kw_only=True)
class Run:
    """What is known after the first run, and what was found since."""

    options: argparse.Namespace
    vendor: str
    seconds: dict = field(default_factory=dict)
    runs: dict = field(default_factory=lambda: defaultdict(set))  # (path, line) -> tests
    noticed: dict = field(default_factory=lambda: defaultdict(Counter))  # path -> tests
    verdicts: list = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def learn(self, seconds, lines):
        self.seconds = seconds
        for test, places in lines.items():
            for place in places:
                self.runs[place].add(test)

    def tests_of(self, mutant):
        """Those that run its statement: first those that noticed something in this file before, then by their time."""
        able = {test for line in mutant.lines for test in self.runs.get((mutant.path, line), ())}
        if 0 < len(able) < FEW:
            able = {test for (path, _), tests in self.runs.items() if path == mutant.path for test in tests}
        favourites = [test for test, _ in self.noticed[mutant.path].most_common(FAVOURITES) if test in able]
        return favourites + sorted(able.difference(favourites), key=lambda test: (self.seconds.get(test, 0.0), test))

    def note(self, verdict):
        with self.lock:
            self.verdicts.append(verdict)
            if verdict.fate == "killed":
                self.noticed[verdict.mutant.path][verdict.by] += 1
            print(verdict, flush=True)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no copy, and no test, is left behind
    options = arguments()
    run = Run(options=options, vendor=vendor_of(options.database))
    with tempfile.TemporaryDirectory(prefix="outbox-mutation-") as place:
        copies = [copy_to(Path(place, str(number)), options.revision) for number in range(options.jobs)]
        found = find(copies[0])
        mutants = [each for each in left_by(options.left_by, found) if wanted(each, options)]
        stale = [each for each in EQUIVALENT if not any(each.matches(mutant) for mutant in found)]
        for each in stale:
            print(f"declared equivalent, but not found: {each}")
        if options.list:
            print(*mutants, f"{len(mutants)} guards", sep="\n")
            return 1 if stale else 0
        if not first_run(run, copies[0], sorted({mutant.path for mutant in found})):
            return 2
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy, dirs_exist_ok=True)
        play_all(run, mutants, copies)
    return report(run, len(mutants), stale)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--database", default="", metavar="URL", help="a server; default: SQLite")
    parser.add_argument("--only", default="*", metavar="GLOB", help="of path:line, such as 'outbox/lanes.py*'")
    parser.add_argument("--kind", default="", help="condition, lock, sql, judgement, check, count or write")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FILE", help="those that shall notice")
    parser.add_argument(
        "--left-by", nargs="+", default=[], metavar="FILE", help="what the runs that printed these left"
    )
    parser.add_argument("--quick", action="store_true", help=f"one guard in {QUICK}, which takes about three minutes")
    parser.add_argument("--revision", default="", help="of the repository; default: as the files are now")
    parser.add_argument("--jobs", type=int, default=1, help="copies at work at the same time")
    parser.add_argument("--list", action="store_true", help="print the guards and change nothing")
    return parser.parse_args()


def wanted(mutant, options):
    sampled = not options.quick or crc32(mutant.name.encode()) % QUICK == 0
    return sampled and fnmatch(mutant.place, options.only) and options.kind in ("", mutant.kind)


def left_by(logs, found):
    """The guards that other runs, of which these are the outputs, have not killed."""
    lines = [line for log in logs for line in Path(log).read_text().splitlines() if line.startswith("killed")]
    killed = Counter(re.sub(r":\d+ ", " ", line.partition(" s  ")[2], count=1) for line in lines)
    often = Counter(mutant.name for mutant in found)
    return [mutant for mutant in found if killed[mutant.name] < often[mutant.name]]


def vendor_of(url):
    scheme = url.partition(":")[0]
    return {"": "sqlite", "postgres": "postgresql", "psql": "postgresql"}.get(scheme, scheme)


def copy_to(directory, revision):
    directory.mkdir()
    if revision:
        archive = directory / "archive.tar"
        subprocess.run(["git", "archive", "-o", archive, revision, *COPIED], cwd=ROOT, check=True)
        shutil.unpack_archive(archive, directory)
        return directory
    ignored = shutil.ignore_patterns("__pycache__", "*.sqlite3*")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=ignored)
        else:
            shutil.copy2(source, directory / name)
    return directory


# --- running ----------------------------------------------------------------------------------------------------------


def run_tests(run, copy, patience=PATIENCE, **how):
    """What `child.play` answers, or None when it hung or died."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answer, question = context.Pipe(duplex=False)
    suffix = os.environ.get("OUTBOX_TEST_SUFFIX", "mutation")
    environment = {"DATABASE_URL": run.options.database, "OUTBOX_TEST_SUFFIX": f"{suffix}_{copy.name}", **ENVIRONMENT}
    arguments = (question, copy, environment, run.options.tests)
    process = context.Process(target=play, args=arguments, kwargs=how, daemon=True)
    process.start()
    question.close()
    try:
        return answer.recv() if answer.poll(patience) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def first_run(run, copy, paths):
    """Run everything unchanged, and learn which test runs which line."""
    started = time.monotonic()
    answer = run_tests(run, copy, LONG_PATIENCE, traced=paths)
    if answer is None or answer[0] != 0:
        print((copy / "mutation.log").read_text(errors="replace")[-5000:], "\nThe tests fail by themselves.", sep="")
        return False
    run.learn(answer[2], answer[3])
    print(f"{len(answer[2])} tests pass on {run.vendor} and are traced, {time.monotonic() - started:.0f} s", flush=True)
    return True


def play_all(run, mutants, copies):
    """Each copy takes the next mutant, until there is none."""
    left = SimpleQueue()
    for mutant in mutants:
        left.put(mutant)

    def work(copy):
        while not left.empty():
            run.note(judge(run, left.get(), copy))

    threads = [Thread(target=work, args=(copy,), daemon=True) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def judge(run, mutant, copy):
    if any(each.matches(mutant) and run.vendor in each.on for each in EQUIVALENT):
        return Verdict(mutant=mutant, fate="equivalent")
    if mutant.kind == "lock" and run.vendor == "sqlite":
        return Verdict(mutant=mutant, fate="needs row locks")
    tests = run.tests_of(mutant)
    if not tests:
        return Verdict(mutant=mutant, fate="unreached")
    path = copy / mutant.path
    original = path.read_bytes()
    times = path.stat()
    started = time.monotonic()
    path.write_bytes(mutant.apply(original))
    try:
        answer = run_tests(run, copy, order=tests)
    finally:
        path.write_bytes(original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seconds = time.monotonic() - started
    if answer is None:
        return Verdict(mutant=mutant, fate="killed", by="hanging", seconds=seconds)
    fate = "survived" if answer[0] == 0 else "killed"
    return Verdict(mutant=mutant, fate=fate, by=answer[1], seconds=seconds)


def report(run, found, stale):
    fates = Counter(each.fate for each in run.verdicts)
    print(f"\n{found} guards on {run.vendor}, {len(run.verdicts)} looked at:", end=" ")
    print(", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())))
    survivors = [each for each in run.verdicts if each.fate == "survived"]
    if survivors:
        print("\nNobody misses:", *(each.mutant for each in survivors), sep="\n")
    unreached = [each for each in run.verdicts if each.fate == "unreached"]
    if unreached:
        print("\nNo test comes here on this database:", *(each.mutant for each in unreached), sep="\n")
    return 1 if survivors or stale else 0


if __name__ == "__main__":
    sys.exit(main())
