"""Conducts a run: lets the processes work, brings the troubles of the plan, and waits for the end of all messages."""

import os
import signal
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue

from django.db import Error, connection
from django.db.models import Count

from outbox import stage
from outbox.database import ServerNow
from outbox.models import Message, State
from tests.chaos import journal, plan
from tests.chaos.troupe import Troupe
from tests.chaos.writer import transact
from tests.running import cut_sessions

GLANCE = 0.1  # seconds between two looks at everything
STALL = 0.5  # seconds without a look from which on the machine itself was stuck
PROGRESS = 10.0
PING = 1.0  # seconds between two questions to the database
SLOW = 0.5  # seconds without an answer from which on it kept everybody waiting
BUSY = 0.5  # seconds from which on a handler runs for long
DRAIN = 600.0  # seconds that the last messages may take, once there is peace
RECOVERY = 30.0  # seconds for what is measured in peace


class Conductor:
    """One run. ``run`` returns the exit codes of the dispatchers, and whether all messages have come to an end."""

    def __init__(self, terms, server, directory, faketime=None, say=print):
        self.terms = terms
        self.plan = plan.make(terms)
        self._server = server
        self._say = say
        self._journal = directory / journal.LINES
        self._running = journal.Running(self._journal)
        self._troupe = Troupe(terms, directory, faketime)
        self._thaws = []  # (when, pid)
        self._restart = None
        self._asker = Asker()
        self._beginning = self._looked_at = self._told_at = self._asked_at = time.monotonic()
        self._counts = {}

    def run(self):
        self._beginning = self._looked_at = time.monotonic()
        os.environ["CHAOS_BEGINNING"] = str(self._beginning)
        journal.note("beginning", wall=time.time())
        self._asker.start()
        troubles = list(self.plan.troubles)
        try:
            while self._elapsed() < self.terms.seconds or not self._is_written():
                self._glance()
                while troubles and troubles[0].at <= self._elapsed():
                    self._bring(troubles.pop(0))
            self._make_peace()
            drained = self._drain()
            if drained:
                drained = all(self._kill_in_peace(each) for each in self.plan.calm)
            return self._troupe.stop(), drained
        finally:
            journal.note("peace", wall=time.time())
            self._make_peace()
            self._asker.stop()
            self._troupe.end()

    def _elapsed(self):
        return time.monotonic() - self._beginning

    def _is_written(self):
        return all(each.done for each in self._troupe.writers)

    # --- looking ------------------------------------------------------------------------------------------------------

    def _glance(self):
        time.sleep(GLANCE)
        now = time.monotonic()
        if now - self._looked_at > STALL:
            journal.note("stall", since=self._looked_at)
        self._looked_at = now
        for at, pid in [each for each in self._thaws if each[0] <= now]:
            self._thaw(at, pid)
        self._troupe.look()
        self._troupe.keep()
        if now - self._asked_at > PING:
            self._asked_at = now
            self._asker.put(ping)
        if now - self._told_at > PROGRESS:
            self._told_at = now
            self._asker.put(self._tell)

    def _tell(self):
        states = dict(Message.objects.values_list("state").annotate(Count("id")).order_by())
        counts = ", ".join(f"{name} {states.get(name, 0)}" for name in State.values)
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items()))
        self._say(f"{self._elapsed():6.0f} s: {counts}; {kinds}")

    def _drain(self):
        """Wait until nothing is pending; returns whether that came about."""
        end = time.monotonic() + DRAIN
        while time.monotonic() < end:
            self._glance()
            found = self._asker.ask(lambda: Message.objects.pending().exists())
            if found is False:
                return True
        return False

    def _kill_in_peace(self, each):
        """Measure how soon the message of a killed process is started again, when nothing else is wrong."""
        [draft] = each.drafts
        transact(each, stage)
        started = self._wait_for(lambda: self._starts(draft.key)[:1])
        if not started:
            return False
        pid, attempt = started[0]["pid"], started[0]["attempt"]
        journal.note("calm kill", pid=pid, key=draft.key, attempt=attempt)
        os.kill(pid, signal.SIGKILL)
        settled = self._wait_for(lambda: self._asker.ask(lambda: not Message.objects.pending().exists()))
        return bool(settled)

    def _wait_for(self, condition):
        end = time.monotonic() + RECOVERY
        while time.monotonic() < end:
            self._glance()
            if found := condition():
                return found
        return None

    def _starts(self, key):
        return [line for line in journal.read(self._journal, "start") if line["key"] == key]

    # --- trouble ------------------------------------------------------------------------------------------------------

    def _bring(self, trouble):
        match trouble.kind:
            case "restart" | "crash":
                self._bring_down(trouble)
            case "cut":
                self._asker.put(self._cut)
            case "kill writer":
                self._kill_one([each.process for each in self._troupe.writers if each.process], trouble, "kill writer")
            case _:
                victims = self._victims(trouble)
                if victims:
                    self._harm(trouble, victims[trouble.target % len(victims)])

    def _victims(self, trouble):
        """Whom it may hit; who is frozen is in trouble already. A freeze hits where it hurts: a handler that runs."""
        frozen = {pid for _, pid in self._thaws}
        found = [pid for pid in self._troupe.victims() if pid not in frozen]
        if trouble.kind != "freeze":
            return found
        since, now = self._running.since(), time.monotonic()
        busy = [pid for pid in found if now - since.get(pid, now) > BUSY]
        return busy or found

    def _note(self, kind, **parts):
        self._counts[kind] = self._counts.get(kind, 0) + 1
        journal.note(kind, **parts)

    def _kill_one(self, found, trouble, kind):
        if found:
            victim = found[trouble.target % len(found)]
            self._note(kind, pid=victim.pid)
            victim.kill()

    def _harm(self, trouble, pid):
        number = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "freeze": signal.SIGSTOP}[trouble.kind]
        since = time.monotonic()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        self._note(trouble.kind, pid=pid, since=since)
        if trouble.kind == "freeze":
            self._thaws.append((since + trouble.seconds, pid))
        elif trouble.kind == "kill":
            self._asker.put(lambda: self._note_held(pid))

    def _note_held(self, pid):
        """What a killed process held, and how long its leases still last: nobody may start before."""
        asked = time.monotonic()
        mine = Message.objects.pending().filter(leased_by__contains=f":{pid}:", lease_token__isnull=False)
        for each in mine.annotate(clock=ServerNow()).values("id", "attempt", "lapses", "due_at", "clock"):
            ends = asked + (each["due_at"] - each["clock"]).total_seconds()
            journal.note("held", pid=pid, id=each["id"], attempt=each["attempt"], lapses=each["lapses"], ends=ends)

    def _thaw(self, at, pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._thaws.remove((at, pid))
        journal.note("thaw", pid=pid)

    def _cut(self):
        self._note("cut", sessions=cut_sessions())

    def _bring_down(self, trouble):
        if self._restart is None or not self._restart.is_alive():
            self._restart = threading.Thread(target=self._restart_server, args=(trouble,))
            self._restart.start()

    def _restart_server(self, trouble):
        since = time.monotonic()
        self._note(trouble.kind, since=since)
        if trouble.kind == "crash":
            self._server.kill()
        else:
            self._server.stop()
        time.sleep(trouble.seconds)
        self._server.start(*self._server.room)
        journal.note("back", since=since)

    def _make_peace(self):
        if self._restart is not None:
            self._restart.join()
        for at, pid in list(self._thaws):
            self._thaw(at, pid)


def ping():
    """Note when the database takes long to answer."""
    asked = time.monotonic()
    Message.objects.filter(pk=0).exists()
    if time.monotonic() - asked > SLOW:
        journal.note("slow", since=asked)


class Asker:
    """A thread that asks the database, so that a server without an answer holds up nothing else."""

    def __init__(self):
        self._questions = SimpleQueue()
        self._answers = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self):
        self._thread.start()

    def stop(self):
        self._questions.put(None)
        self._thread.join(10)

    def put(self, question):
        """Ask it some time; errors are forgotten."""
        self._questions.put(question)

    def ask(self, question, seconds=10.0):
        """The answer, or None if the database gave none."""
        self._questions.put(lambda: self._answers.put(question()))
        with suppress(Empty):
            return self._answers.get(timeout=seconds)

    def _work(self):
        while (question := self._questions.get()) is not None:
            try:
                question()
            except Error:
                connection.close()
        connection.close()
