"""The whole life of messages in processes with other ideas of time: no zones, odd zones, nights when clocks change."""

import subprocess
import sys
import time

import pytest
from django.db import connection

from tests.conftest import ROOT
from tests.processes import jobs

pytestmark = [pytest.mark.process, pytest.mark.django_db(transaction=True)]

LIFE = '''
import io, time
from datetime import UTC, datetime, timedelta
import django
django.setup()
from django.conf import settings
from django.core.management import call_command
from django.db import transaction
from django.utils import timezone
from outbox import Retry, Snooze, handler, stage
from outbox.database import server_now
from outbox.fields import from_micros
from outbox.leases import claim, settle
from outbox.models import Message
from outbox.registry import registry
from outbox.retention import prune
from outbox.testing import drain
from outbox.verdicts import release

registry.__init__()
runs = []

def now():
    return from_micros(server_now("default"))

def row(key):
    return Message.objects.get(event_key=key)

def waits(key):
    """Seconds until a message is due, by the database's clock."""
    return (row(key).due_at - now()).total_seconds()

@handler("job", ordering="none", payload_versions=(1,))
def job(message):
    runs.append(message.event_key)
    verdict = {"retry": Retry(after=60), "snooze": Snooze(until=moment)}.get(message.event_key)
    if verdict and message.attempt == 1:
        raise verdict

def clock(seconds):
    """The time in so many seconds, as this project writes it: aware, or naive in TIME_ZONE."""
    instant = datetime.fromtimestamp(time.time() + seconds, tz=UTC)
    return instant if settings.USE_TZ else timezone.make_naive(instant, timezone.get_default_timezone())

moment = clock(300)
assert timezone.is_naive(moment) is not settings.USE_TZ

with transaction.atomic():
    for key in ("now", "retry", "snooze", "orphan"):
        stage("job", {}, event_key=key)
    stage("job", {}, event_key="later", deliver_at=timedelta(seconds=300))
    stage("job", {}, event_key="at", deliver_at=moment)
    stage("job", {}, event_key="stale", expires_at=clock(-5))

# a delivery time in five minutes is in five minutes, whichever way it was given
assert 295 < waits("later") <= 300, waits("later")
assert 295 < waits("at") <= 300, waits("at")

# a worker dies with one message: it is taken over when its lease is over, not before and not hours later
(lease,) = claim(using="default", worker="dead", seconds=0.5, ids=[row("orphan").pk])
assert claim(using="default", worker="next", seconds=30, ids=[row("orphan").pk]) == []
end = time.monotonic() + 20
while not (taken := claim(using="default", worker="next", seconds=30, ids=[row("orphan").pk])):
    assert time.monotonic() < end
    time.sleep(0.05)
assert 25 < waits("orphan") <= 30
settle("default", [release(taken[0])])

report = drain()
assert runs == ["now", "retry", "snooze", "orphan"], runs
assert (report.delivered, report.retried, report.snoozed, report.discarded) == (2, 1, 1, 1), report
assert 55 < waits("retry") <= 60, waits("retry")
assert 285 < waits("snooze") <= 300, waits("snooze")
assert row("stale").state == "discarded"

# what is read and printed agrees
for command in (["outbox_status"], ["outbox_show", str(row("retry").pk)], ["outbox_explain", str(row("later").pk)]):
    out = io.StringIO()
    call_command(*command, stdout=out)
    assert out.getvalue()
assert (row("now").settled_at - now()).total_seconds() > -20

# nothing is too young or too old to be pruned by hours
with_age = {"now": 3500, "orphan": 3700}
for key, age in with_age.items():
    Message.objects.filter(event_key=key).update(settled_at=now() - timedelta(seconds=age))
prune("default", after=3600)
assert sorted(Message.objects.values_list("event_key", flat=True)) == ["at", "later", "now", "retry", "snooze", "stale"]
print("lived")
'''

NEW_YORK, KATHMANDU = "America/New_York", "Asia/Kathmandu"
# Two seconds before the clocks of New York change, in 2026: at 06:00 UTC in autumn, at 07:00 UTC in spring.
AUTUMN, SPRING = 1793512798, 1772953198


def live(process_environment, journal, **environment):
    """Live that life in a process with this environment."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIFE],
        cwd=ROOT,
        env={
            **process_environment,
            "DJANGO_SETTINGS_MODULE": "tests.processes.settings",
            jobs.JOURNAL: str(journal.path),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.endswith("lived\n")


@pytest.mark.parametrize("zone", [NEW_YORK, pytest.param(KATHMANDU, marks=pytest.mark.slow)])
def test_without_time_zones_everything_happens_at_its_time(process_environment, journal, zone):
    """Scenario 20."""
    live(process_environment, journal, USE_TZ="False", TIME_ZONE=zone)


@pytest.mark.slow
def test_with_time_zones_it_does_so_too(process_environment, journal):
    """Scenario 20: the same behaviour."""
    live(process_environment, journal, USE_TZ="True", TIME_ZONE=KATHMANDU)


@pytest.mark.slow
@pytest.mark.skipif(connection.vendor != "sqlite", reason="the clock of a server cannot be set from here")
@pytest.mark.parametrize("night", [AUTUMN, SPRING], ids=["autumn", "spring"])
def test_in_the_nights_when_clocks_change_leases_and_backoffs_keep_their_length(process_environment, journal, night):
    """Scenario 21."""
    live(
        process_environment,
        journal,
        USE_TZ="False",
        TIME_ZONE=NEW_YORK,
        PRETEND_CLOCK=str(night - time.time()),
    )
