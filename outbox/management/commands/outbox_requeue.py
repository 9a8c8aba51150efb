"""``manage.py outbox_requeue``: give dead messages a fresh budget."""

from outbox.management.bulk import BulkCommand
from outbox.models import State
from outbox.operations import requeue


class Command(BulkCommand):
    help = (
        "Requeue dead (or discarded) messages: due now, with a fresh budget. In a lane that went on, order is given up."
    )
    verb, past = "requeue", "requeued"
    states = (State.DEAD, State.DISCARDED)
    operate = staticmethod(requeue)
