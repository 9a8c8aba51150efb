"""The loop of one dispatcher process: claim what fits, start it, wait; and stop without losing anything.

Threads: this loop claims and charges; workers run handlers; the settler writes outcomes; the heartbeat renews; the
housekeeping sweeps and prunes. Each has a connection of its own, and none can end silently: every loop survives the
loss of the database, backs off with jitter and resumes by itself.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from django.db import Error, reset_queries

from outbox.appetite import Appetite
from outbox.breakers import Breakers
from outbox.calls import Ended
from outbox.database import close_quietly, give_back
from outbox.heartbeat import Heartbeat
from outbox.housekeeping import Housekeeping
from outbox.leases import Claim, Claimer, Lease, Settled, charge
from outbox.outages import Outage
from outbox.plans import Plan, closed
from outbox.registration import REPORT_EVERY, Registration, worker_name
from outbox.settler import Settler
from outbox.slots import Slots
from outbox.verdicts import interrupted, release, timed_out
from outbox.vitals import Vitals
from outbox.wakeup import Waiter
from outbox.workers import Workers

logger = logging.getLogger("outbox")

POLL_JITTER = (0.1, 0.3)  # of the poll interval, added at random: processes started together shall not look together
CONTENDED_PAUSE = 0.05  # seconds at most before looking again at rows that somebody else was taking
SHORT_RUN_TRIES = 3  # of a claim while the database is away, in runs that shall end by themselves
LAST_WRITES = 5.0  # seconds beyond the grace for writing the last outcomes
LEAVING = 1.0  # seconds that a process takes at most to end after its last writes


class Dispatcher:
    """Claims and delivers until it is stopped, or until its plan is fulfilled. ``failure`` says why it gave up."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.name = worker_name()
        self.failure: str | None = None
        self.left_running = 0
        self._stopping = threading.Event()
        self._waiter = Waiter(plan.using, plan.poll * (1 + POLL_JITTER[1]))
        self._claimer = Claimer(using=plan.using, worker=self.name, handlers=plan.handlers)
        self._slots = Slots(
            concurrency=plan.concurrency,
            handlers=plan.handlers,
            batch=plan.batch,
            lease_seconds=plan.lease,
            prefetch=plan.limit is None,
        )
        self.vitals = Vitals(plan, self._slots, self._stopping.is_set)
        self._breakers = Breakers(
            using=plan.using, handlers=plan.handlers, concurrency=plan.concurrency, worker=self.name
        )
        self._appetite = Appetite(plan, self._slots, self._breakers)
        self._settler = Settler(
            using=plan.using,
            slots=self._slots,
            batch=plan.batch,
            seconds=plan.lease,
            may_continue=lambda lease: not self._stopping.is_set() and self._appetite.may_continue(lease),
            woke=self._has_settled,
        )
        self._workers = Workers(self._slots, self._report_ends)
        self._registration = Registration(
            using=plan.using,
            name=self.name,
            handlers=[each.name for each in plan.handlers],
            concurrency=plan.concurrency,
        )
        self._heartbeat = Heartbeat(
            using=plan.using,
            seconds=plan.lease,
            held=self._slots.held,
            report=self._report_alive,
            worked_at=lambda: self.vitals.worked_at,
            window=max(plan.lease, 3 * plan.poll),
            give_up=self._give_up,
        )
        self._housekeeping = Housekeeping(using=plan.using, name=self.name)
        self._reported_at = -REPORT_EVERY
        self._outage = Outage(plan.using, f"Dispatcher {self.name}")
        self.vitals.watch(self._outage, self._settler.outage, self._heartbeat.outage)
        self._closed: Counter[str] = Counter()
        self._hungry = True
        self._nudged = False

    # --- from other threads -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Claim nothing more, let what runs finish within the grace, give the rest back. Any thread may call it."""
        self._stopping.set()
        self._waiter.wake()

    def abandon(self) -> None:
        """Note that the thread of `run` hangs, in a statement without an answer, and that nobody waits for it."""
        self.failure = self.failure or f"Dispatcher {self.name} did not stop within its grace"
        self.left_running += 1

    @property
    def counts(self) -> dict[str, int]:
        """What became of the messages so far."""
        counts = Counter(dict(self._settler.counts)) + self._closed
        names = ("delivered", "retried", "dead", "discarded", "skipped")
        return {"processed": sum(counts.values()), **{name: counts[name] for name in names}}

    def _report_ends(self, ends: Sequence[Ended]) -> None:
        self._breakers.note_all([each.settlement if isinstance(each, Settled) else each for each in ends])
        self._settler.put_all(ends)
        if self._hungry:
            self._nudge()

    def _has_settled(self) -> None:
        self.vitals.work()
        self._nudge()

    def _nudge(self) -> None:
        if not self._nudged:
            self._nudged = True
            self._waiter.wake()

    def _report_alive(self) -> bool:
        now = time.monotonic()
        if self.plan.ends_by_itself or now - self._reported_at < REPORT_EVERY:
            return True
        if reported := self._registration.report(
            in_flight=len(self._slots.held()), wakeup=self._waiter.mode, stopping=self._stopping.is_set()
        ):
            self._reported_at = now
        return reported

    def _give_up(self, reason: str) -> None:
        logger.critical("Dispatcher %s gives up: %s", self.name, reason)
        self.failure = reason
        self.stop()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Work until stopped; returns the exit code, 0 or 1. Blocks the calling thread, and raises nothing."""
        try:
            try:
                self._start()
                self._loop()
            finally:
                self._shut_down()
        except BaseException as error:
            logger.exception("Dispatcher %s failed.", self.name)
            self.failure = self.failure or f"{type(error).__name__}: {error}"
        return 1 if self.failure else 0

    def _start(self) -> None:
        self._workers.start()
        self._settler.start()
        self._heartbeat.start()
        if not self.plan.ends_by_itself:
            self._housekeeping.start()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._nudged = False  # before looking: what happens from here on ends the next wait
            self.vitals.tick()
            try:
                was_empty = self._slots.is_empty()
                claim = self._pass()
                if self._appetite.progress.is_fulfilled(claim, was_empty=was_empty, is_empty=self._slots.is_empty()):
                    return
                if not (claim.leases or claim.more or (claim.lonely and self._slots.is_empty())):
                    self._wait(
                        contended=claim.contended or claim.spared or (claim.snoozed and self.plan.ends_by_itself)
                    )
            except Exception as error:
                self._survive(error)
            reset_queries()

    def _pass(self) -> Claim:
        """One round: free the slots of handlers that are out of time, start what is queued, claim what fits."""
        self._abandon_overdue()
        self._slots.await_room()
        want = self._appetite.for_others()
        if want.limit <= 0:
            self._start_queued()
            want = self._appetite.now()
        for name in self._breakers.take_opened():
            self._give_back(self._slots.unqueue(name))
        if want.limit <= 0 or not any(want.room.values()):
            self._hungry = True
            return Claim()
        self._settler.forget_due()
        self._heartbeat.catch_up()
        claim = self._claimer.claim(
            want.limit,
            seconds=self.plan.lease,
            start=want.start,
            room=want.room,
            alone=self._appetite.alone,
            ours=self._slots.lanes(),
        )
        self.vitals.work(claimed=True)
        self._outage.over()
        self._appetite.note(claim)
        self._slots.add(claim.leases)
        self._closed.update(closed(claim))
        self._hungry = claim.more or claim.lonely or len(claim.leases) >= want.limit
        self._start_queued()
        return claim

    def _start_queued(self) -> None:
        """Charge the queued messages for which a slot is free, and start them."""
        leases = self._slots.startable()
        if not leases:
            return
        try:
            charged = charge(self.plan.using, leases)
        except BaseException:
            self._slots.put_back(leases)
            raise
        for lost in {*set(leases).difference(charged), *self._slots.start(charged)}:
            lost.view.revoke()
            self._settler.put(lost, release(lost))  # refused by the fence, or given back

    def _abandon_overdue(self) -> None:
        for first in self._slots.abandon_overdue():
            self._workers.add()
            logger.warning("Message %s: its handler %r ran out of time.", first.id, first.handler.name)
            ends = {lease: timed_out(lease) for lease in first.call}  # whose views are told
            self._settler.put_all([end for lease, end in ends.items() if lease.message.lane is None])
        stuck = self._slots.abandoned()
        if stuck >= self.plan.concurrency and not self._stopping.is_set():
            self._give_up(f"{stuck} handlers are stuck beyond their timeout; their threads cannot be stopped")

    def _wait(self, *, contended: bool) -> None:
        give_back(self.plan.using)
        now = time.monotonic()
        longest = self.plan.poll * (1 + random.uniform(*POLL_JITTER))  # noqa: S311 - jitter, not secrecy
        moments = (self._settler.next_due(), self._breakers.next_look())
        timeout = min(longest, self._slots.next_timeout(), min(moments) - now)
        if contended:
            timeout = min(timeout, random.uniform(0.2, 1) * CONTENDED_PAUSE)  # noqa: S311
        self._waiter.wait(max(0.0, timeout))

    def _survive(self, error: Exception) -> None:
        """Get over an error of the loop; runs that shall end by themselves give up after a few."""
        pause = self._outage.note(error)
        self.vitals.look_for_tables(error)
        short = self.plan.ends_by_itself and self._outage.failures >= SHORT_RUN_TRIES
        if isinstance(error, Error) and (short or self.plan.exit_on_database_error):
            self._give_up(f"the database {self.plan.using!r} failed: {error}")
        self._stopping.wait(pause)

    # --- the stop -----------------------------------------------------------------------------------------------------

    def _shut_down(self) -> None:
        """Give back what has not started, wait for what runs, and write the last outcomes."""
        deadline = time.monotonic() + self.plan.grace
        self._stopping.set()
        self._give_back(self._slots.withdraw())
        while True:
            self._nudged = False
            self._abandon_overdue()
            if self._slots.is_quiet() or time.monotonic() >= deadline:
                break
            self._waiter.wait(min(0.2, deadline - time.monotonic(), self._slots.next_timeout()))
        self._housekeeping.stop(1.0)
        self._interrupt()
        self._settler.stop(LAST_WRITES)
        self._heartbeat.stop(1.0)
        self._workers.stop(1.0)
        if not self.plan.ends_by_itself:
            self._registration.leave()
        self._waiter.close()
        close_quietly(self.plan.using)

    def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._settler.put(lease, release(lease))

    def _interrupt(self) -> None:
        """Settle what still runs."""
        unfinished = self._slots.unfinished()
        self.left_running = len(unfinished)
        for ran in unfinished:
            self._settler.put_all(interrupted(ran.lease.call, out_of_time=ran.abandoned, rest=LEAVING))
