"""The parent of several dispatcher processes: it starts them, watches them, replaces them, and stops them.

It touches no database and runs no handler, so nothing of theirs can take it along. How it sees each child::

                spawn               first report
    waiting ────────────▶ starting ──────────────▶ working
       ▲                     │                        │ told to stop, or says that it recycles itself
       │ growing pause;      │                        ▼
       │ none after a        │                     leaving
       │ recycling           │ silent, or too slow    │
       │                     ▼                        │
       └──────────────── (killed) ───▶ ended ◀────────┘
                                         └──▶ refused: a usage error ends the parent, with its message and code

If one side dies:

========  ===============================================  ===========================================================
while     the child dies                                   the parent dies
========  ===============================================  ===========================================================
waiting   there is none                                    nothing is started
starting  replaced after a pause                           it finds its pipe closed, and stops before it claims
working   replaced after a pause; its leases run out, the  end of the pipe: it claims nothing more, finishes within
          crash is counted, and others deliver             the grace, gives the rest back and exits with 0
leaving   as above; counted as far as it reported          it stops anyhow; nobody hears its last report
frozen    killed when its patience is over, then as above  it stops as soon as it goes on
========  ===============================================  ===========================================================
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter

from outbox.health import Problem, Verdict
from outbox.posts import CHANGING, Post, Terms

logger = logging.getLogger("outbox")

ASLEEP = 2.0  # seconds between two looks from which on it was this process that slept
STUCK = 10.0  # seconds without a look that a probe tells


class Supervisor:
    """Keeps so many children at work until it is stopped. One thread calls `start`, `stop` and `go_on`."""

    def __init__(self, terms: Terms) -> None:
        self.failures: list[str] = []
        self.code = 1  # when there are failures
        self._posts = [Post(number, terms) for number in range(1, terms.processes + 1)]
        self._stopping = False
        self._looked_at = time.monotonic()

    def start(self) -> None:
        self._looked_at = time.monotonic()

    def stop(self) -> None:
        """Ask all to stop, once."""
        if not self._stopping:
            self._stopping = True
            logger.info("Stopping %d processes: nothing more is claimed, and what runs may finish.", len(self._posts))
            for post in self._posts:
                post.stop()

    def kill(self) -> None:
        """Kill all at once; a signal handler may call it."""
        for post in self._posts:
            if post.child is not None:
                post.child.kill()

    def go_on(self) -> bool:
        """Look after everybody once; False when all have ended after a stop."""
        slept = time.monotonic() - self._looked_at
        self._looked_at = time.monotonic()
        for post in self._posts:
            if slept > ASLEEP:
                post.credit(slept)
            post.look()
            if post.refusal and not self._stopping:
                text, self.code = post.refusal
                self.failures.append(text)
                self.stop()
        reap_orphans({post.child.pid for post in self._posts if post.child is not None})
        if not self._stopping or any(post.child is not None for post in self._posts):
            return True
        self.failures += [failure for post in self._posts for failure in post.failures]
        return False

    @property
    def counts(self) -> Counter[str]:
        """What became of the messages: the sum of all children, of dead ones as far as they reported."""
        total: Counter[str] = Counter()
        for post in self._posts:
            total.update(post.counts)
            if post.child is not None:
                total.update(post.child.news.get("counts", {}))
        return total

    def verdict(self) -> Verdict:
        """Live while it looks after its children and one of them lives; ready when all who report are."""
        silence = time.monotonic() - self._looked_at
        text = f"the parent process has not looked after its children for {silence:.0f} s"
        own = [Problem(kind="parent_stuck", where="parent", text=text)] if silence > STUCK else []
        seen = [post.verdict() for post in self._posts]
        nobody, working = all(each.live for each in seen), any(not each.ready for each in seen)
        return Verdict(
            live=own + ([problem for each in seen for problem in each.live] if nobody else []),
            ready=own
            + [problem for each in seen for problem in each.ready if not (working and problem.kind == CHANGING)],
            started=[problem for each in seen for problem in each.started],
            details=[detail for each in seen for detail in each.details],
        )


def reap_orphans(ours: set[int]) -> None:
    """As process 1 of a container: reap what handlers started and left behind, or it stays as a zombie for ever.

    Our own children are waited for by their parents' objects, which must learn their exit codes.
    """
    if os.getpid() != 1 or not hasattr(os, "waitid"):
        return
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in ours:
            return
        os.waitpid(found.si_pid, 0)
