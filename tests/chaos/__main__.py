"""Run the chaos suite for as long as wanted.

    python -m tests.chaos --database postgres --minutes 30 --seed 7
    python -m tests.chaos --judge DIRECTORY

It makes a server of its own, prints its progress and a table of figures, and exits with 1 if a promise was broken.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import django
import pytest

from tests.chaos import journal, terms

PER_SECOND = 10  # messages, if their number is not given


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--database", choices=("postgres", "mariadb", "sqlite"), default="sqlite")
    add("--minutes", type=float, default=1.0, help="how long there is trouble (%(default)s)")
    add("--seed", type=int, default=random.randrange(10**6), help="replays the plan of a run")
    add("--messages", type=int, help=f"how many are staged; default: {PER_SECOND} a second")
    add("--kill-every", type=float, default=2.0, help="seconds between two SIGKILLs, on average (%(default)s)")
    add("--restart-every", type=float, default=30.0, help="seconds between two restarts of the server (%(default)s)")
    add("--json", type=Path, help="write the figures there, too")
    add("--directory", type=Path, help="for journal and logs; default: a new one in the place for temporary files")
    add("--judge", type=Path, metavar="DIRECTORY", help="only check what a run has left there")
    return parser.parse_args()


def terms_of(given):
    return terms.Terms(
        seed=given.seed,
        database=given.database,
        seconds=given.minutes * 60,
        messages=given.messages or int(given.minutes * 60 * PER_SECOND),
        kill_every=given.kill_every,
        restart_every=given.restart_every,
    )


def say(text):
    print(text, flush=True)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started is ended, too
    given = arguments()
    agreed, directory = terms_of(given), given.directory or given.judge
    if given.judge:
        agreed = terms.Terms(**json.loads((directory / journal.TABLES).read_text())["terms"])
    directory = directory or Path(tempfile.mkdtemp(prefix="outbox-chaos-"))
    directory.mkdir(exist_ok=True, parents=True)
    say(f"seed {agreed.seed}, {agreed.messages} messages in {agreed.seconds:.0f} s on {agreed.database}; {directory}")
    os.environ[journal.VARIABLE] = str(directory / journal.LINES)
    os.environ[terms.VARIABLE] = agreed.dump()
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.chaos.settings"
    from tests.chaos.run import judge, run  # deferred: needs the environment

    try:
        django.setup() if given.judge else run(agreed, directory, say)
    except pytest.skip.Exception as missing:
        say(str(missing))
        return 2
    found, violations = judge(agreed, directory, say)
    if given.json:
        report = {"terms": json.loads(agreed.dump()), "figures": found, "violations": violations}
        given.json.write_text(json.dumps(report, indent=2))
    broken = any(violations.values())
    say(f"seed {agreed.seed}: " + ("promises were BROKEN" if broken else "all promises were kept"))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
