"""Run transactions in threads that take one step at a time: each statement, and each COMMIT, waits for a permit."""

import queue
import threading
import time
from contextlib import ExitStack

import pytest
from django.db import connections

PROMPT = 0.02  # seconds after which an actor that has not come back may be waiting for a lock
PATIENCE = 30.0  # seconds after which a test gives up


class Actor:
    """A thread with a connection of its own that runs jobs, stopping before each statement and before each COMMIT.

    ``state``: "idle", "ready" (wants a permit for ``next``) or "running", in which it may be waiting for a lock.
    """

    def __init__(self, name, alias="default"):
        self.name = name
        self.alias = alias
        self.state = "idle"
        self.next = ""
        self.commits = False  # whether the next step makes changes visible to others
        self.log = []
        self.result = self.error = None
        self._free = False
        self._jobs = queue.Queue()
        self._permit = threading.Semaphore(0)
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"actor-{name}", daemon=True)
        self._thread.start()

    # --- from the director's thread

    def begin(self, job):
        """Start a job; it stops before its first statement."""
        while self._permit.acquire(blocking=False):
            pass  # left over from a job that was let go
        self.log, self.result, self.error, self._free = [], None, None, False
        self.state = "running"
        self._jobs.put(job)
        self.settle_down(PATIENCE)

    def step(self, prompt=PROMPT):
        """Permit one step. Returns False when the actor did not come back: somebody's lock holds it up."""
        assert self.state == "ready"
        self.state = "running"
        self._permit.release()
        return self.settle_down(prompt)

    def run_until(self, *words):
        """Permit steps until the next one contains all the words."""
        while self.state == "ready" and not all(word in self.next for word in words):
            assert self.step(PATIENCE), f"{self.name} waits for a lock at {self.log[-1]}"
        assert self.state == "ready", f"{self.name} never came to {words}: {self.log}"

    def finish(self, timeout=PATIENCE):
        """Let the job run to its end and return its result, or raise its error."""
        self.let_go()
        assert self.settle_down(timeout, "idle"), f"{self.name} hangs at {self.next}"
        if self.error is not None:
            raise self.error
        return self.result

    def let_go(self):
        """From now on no step needs a permit."""
        self._free = True
        if self.state == "ready":
            self.state = "running"
        self._permit.release()

    def settle_down(self, timeout, *states):
        """Wait until the actor wants a permit or has finished."""
        with self._news:
            return self._news.wait_for(lambda: self.state in (states or ("idle", "ready")), timeout)

    def close(self):
        self.let_go()
        self._jobs.put(None)
        self._thread.join(PATIENCE)

    @property
    def writes(self):
        """Whether a transaction has begun that is not over."""
        begun = bool(self.log) and "COMMIT" not in self.log[-1] and any(step.startswith("BEGIN") for step in self.log)
        return begun and self.state != "idle" and not self.next.startswith("BEGIN")

    # --- in the actor's thread

    def _work(self):
        connection = connections[self.alias]
        commit = connection.commit
        connection.commit = lambda: (self._stop_before("COMMIT", commits=True), commit())
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    with ExitStack() as stack:
                        stack.enter_context(connection.execute_wrapper(self._wrapper))
                        self.result = job()
                except BaseException as error:
                    self.error = error
                self._tell("idle")
        finally:
            connections.close_all()

    def _wrapper(self, execute, sql, params, many, context):
        self._stop_before(sql, commits=not context["connection"].in_atomic_block)
        return execute(sql, params, many, context)

    def _stop_before(self, step, *, commits):
        if self._free:
            return
        self.next, self.commits = step, commits
        self._tell("ready")
        self._permit.acquire()
        self.log.append(step)

    def _tell(self, state):
        with self._news:
            self.state = state
            self._news.notify_all()


class Director:
    """Lets several actors take turns. What holds an actor up is found out by trying.

    ``one_writer``: the database has one writer, who would hold up all others; so nobody begins while another writes.
    """

    def __init__(self, actors, *, one_writer):
        self.actors = actors
        self.one_writer = one_writer

    def play(self, random, after_commit, most=2000):
        """Permit steps in random order until every job has ended, calling ``after_commit`` after each COMMIT."""
        deadline = time.monotonic() + PATIENCE
        for _ in range(most):
            ready = [actor for actor in self.actors if actor.state == "ready"]
            if self.one_writer and any(actor.writes for actor in self.actors):
                ready = [actor for actor in ready if not actor.next.startswith("BEGIN")]
            if ready:
                actor = random.choice(ready)
                commits = actor.commits
                actor.step()
                if commits:
                    after_commit()
            elif all(actor.state == "idle" for actor in self.actors):
                return
            else:
                running = next(actor for actor in self.actors if actor.state == "running")
                running.settle_down(PROMPT)
                assert time.monotonic() < deadline, f"all wait: {[(a.name, a.state, a.next) for a in self.actors]}"
        raise AssertionError(f"no end after {most} steps: {[(a.name, a.next) for a in self.actors]}")


@pytest.fixture
def actors():
    """Start named actors: threads that stop before each statement."""
    started = []

    def start(*names):
        started.extend(Actor(name) for name in names)
        return started[-len(names) :]

    yield start
    for actor in started:
        actor.close()
