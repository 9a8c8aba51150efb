"""One circuit breaker per handler: while the other side is down its messages are left alone, but for a probe.

Several messages in a row that find it unavailable open the breaker: an outage is judged across different messages, so
that one that always says so stops nobody else. Then no message of the handler is claimed, except a single one now and
then, by one process of all: the probe. Any other end than "unavailable" closes the breaker, and the messages that have
waited start a few at a time: each success doubles their number.

What a process knows is in its memory. The row that an open breaker has in the database makes it visible, lets the
processes share the probes, and can be deleted by whoever knows better.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from django.db import IntegrityError

from outbox.conf import options
from outbox.database import ServerNow, with_clock
from outbox.handlers import Handler
from outbox.leases import Settlement
from outbox.models import Breaker, Outcome, State
from outbox.wants import Want

logger = logging.getLogger("outbox")

BUSY_PAUSE = 0.5  # seconds until a probe is tried again for which there was no slot
LOOK_EVERY = 5.0  # seconds between two looks at the row of an open breaker: somebody may have closed it
_NEUTRAL = (Outcome.RELEASED, Outcome.INTERRUPTED, Outcome.SNOOZED, Outcome.TIMED_OUT)


@dataclass(slots=True)
class _Circuit:
    """What one process knows of one handler's other side.

    ``down``: messages that found it unavailable since it last answered. ``fresh``: opened or closed in memory only.
    ``most``: messages that may run at once while it recovers; None: as many as there are slots.
    """

    down: dict[int, Settlement] = field(default_factory=dict)
    is_open: bool = False
    fresh: bool = False
    most: int | None = None
    look_at: float = 0.0


class Breakers:
    """The breakers of one process. `note` is called by the threads of the handlers, the rest by the one that claims."""

    def __init__(self, *, using: str, handlers: Sequence[Handler], concurrency: int, worker: str) -> None:
        self.using = using
        self.worker = worker
        self._concurrency = concurrency
        self._options = options()
        self._circuits = {each.name: _Circuit() for each in handlers}
        self._known = False
        self._opened: list[str] = []
        self._lock = threading.Lock()

    # --- the threads of the handlers ----------------------------------------------------------------------------------

    def note_all(self, settlements: Sequence[Settlement]) -> None:
        """Learn from the ends of one call: what ended it as a whole is noted once, as for a single message."""
        noted: set[int] = set()
        for each in settlements:
            if each.cause is None or id(each.cause) not in noted:
                noted.add(id(each.cause))
                self.note(each)

    def note(self, settlement: Settlement) -> None:
        """Learn from the end of an attempt, before it is settled."""
        outcome, lease = settlement.outcome, settlement.lease
        circuit = self._circuits.get(lease.handler.name)
        if circuit is None or not self._options.BREAKER_FAILURES or outcome in _NEUTRAL:
            return
        with self._lock:
            if outcome == Outcome.UNAVAILABLE:
                circuit.down[lease.id] = settlement
                if not circuit.is_open and len(circuit.down) >= self._options.BREAKER_FAILURES:
                    circuit.is_open = circuit.fresh = True
                    self._opened.append(lease.handler.name)
                return
            circuit.down.clear()
            if circuit.is_open:
                circuit.is_open, circuit.fresh, circuit.most = False, True, 1
            elif circuit.most is not None and settlement.state == State.DELIVERED:
                circuit.most *= 2
                if circuit.most >= self._concurrency:
                    circuit.most = None

    def is_closed(self, name: str) -> bool:
        """Whether the other side of this handler is believed to be there, and not only just back."""
        circuit = self._circuits.get(name)
        return circuit is None or (not circuit.is_open and circuit.most is None)

    # --- the thread that claims ---------------------------------------------------------------------------------------

    def admit(self, want: Want, load: Callable[[], Mapping[str, int]]) -> Want:
        """Take out of ``want`` what open breakers do not let through; ``load()``: how many of each handler are held.

        Asks the database only when a breaker changes or its probe is due; raises its errors.
        """
        self._look_at_first()
        changed = {name: each for name, each in self._circuits.items() if each.fresh or each.is_open or each.most}
        room = dict(want.room)
        for name, circuit in changed.items():
            if circuit.fresh:
                self._write(name, circuit)
            if want.limit <= 0 or not room.get(name):
                continue
            if circuit.is_open:
                room[name] = int(self._may_probe(name, circuit))
            elif circuit.most is not None:
                room[name] = max(0, min(room[name], circuit.most - load()[name]))
        return want if room == want.room else replace(want, room=room, start=min(want.start, max(room.values())))

    def next_look(self) -> float:
        """The monotonic time at which an open breaker is to be looked at; infinite if none is open.

        One that was not looked at when its time came had no slot then.
        """
        now = time.monotonic()
        looks = [each.look_at for each in self._circuits.values() if each.is_open]
        return min((at if at > now else now + BUSY_PAUSE for at in looks), default=float("inf"))

    def take_opened(self) -> list[str]:
        """The handlers whose breakers have opened since the last call."""
        with self._lock:
            opened, self._opened = self._opened, []
        return opened

    def _look_at_first(self) -> None:
        """Learn once which breakers are open: a process that has just started need not find out by itself."""
        if self._known or not self._options.BREAKER_FAILURES:
            return
        rows = Breaker.objects.using(self.using).filter(handler__in=list(self._circuits))
        for name in rows.values_list("handler", flat=True):
            self._circuits[name].is_open = True
        self._known = True

    def _write(self, name: str, circuit: _Circuit) -> None:
        """Tell the others that a breaker opened, or closed."""
        with self._lock:
            is_open, cause = circuit.is_open, next(reversed(circuit.down.values()), None)
            circuit.fresh = False
        try:
            if is_open and cause is not None:
                self._open(name, circuit, cause)
            elif Breaker.objects.using(self.using).filter(handler=name).delete()[0]:
                logger.warning("Handler %r goes on: the other side answers again.", name)
        except BaseException:
            circuit.fresh = True
            raise

    def _open(self, name: str, circuit: _Circuit, cause: Settlement) -> None:
        error = cause.error
        pause = self._wait(0)
        circuit.look_at = time.monotonic() + min(pause, LOOK_EVERY)
        try:
            Breaker.objects.using(self.using).create(
                handler=name,
                opened_at=ServerNow(),
                probe_at=ServerNow() + int(pause * 1_000_000),
                error_type=error.type,
                error_code=error.code,
                error_text=error.text,
                worker=self.worker,
            )
        except IntegrityError:
            return  # another process was first
        logger.warning("Handler %r pauses: its other side is unavailable (%s: %s).", name, error.type, error.text)

    def _may_probe(self, name: str, circuit: _Circuit) -> bool:
        """Whether this process may send the next message to see whether the other side is back."""
        if time.monotonic() < circuit.look_at:
            return False
        rows = with_clock(Breaker.objects.using(self.using).filter(handler=name))
        row = rows.first()
        if row is None:  # another process, or a person, has closed it
            with self._lock:
                circuit.is_open, circuit.most = False, 1
                circuit.down.clear()
            return True
        wait = (row.probe_at - row.clock).total_seconds()
        if wait <= 0:
            pause = self._wait(row.probes + 1)
            mine = Breaker.objects.using(self.using).filter(pk=row.pk, probes=row.probes)  # nobody probed meanwhile
            later = ServerNow() + int(pause * 1_000_000)
            won = mine.update(probe_at=later, probes=row.probes + 1, probed_by=self.worker)
            circuit.look_at = time.monotonic() + min(pause, LOOK_EVERY)
            return bool(won)
        circuit.look_at = time.monotonic() + min(wait, LOOK_EVERY)
        return False

    def _wait(self, probes: int) -> float:
        """Seconds until the next probe: they grow, up to the cap, and differ from process to process."""
        longest: float = min(self._options.BREAKER_PAUSE_CAP, self._options.BREAKER_PAUSE * 2 ** min(probes, 30))
        return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not secrecy


def reset(using: str, handler: str) -> bool:
    """Close the breaker of a handler by hand; dispatchers notice within seconds. Returns whether it was open."""
    return bool(Breaker.objects.using(using).filter(handler=handler).delete()[0])
