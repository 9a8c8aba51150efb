"""``manage.py outbox_discard``: settle messages without delivery."""

from outbox.management.bulk import BulkCommand
from outbox.models import State
from outbox.operations import discard


class Command(BulkCommand):
    help = "Discard dead or pending messages: kept as rows, never delivered. A message in flight is left alone."
    verb, past = "discard", "discarded"
    states = (State.DEAD, State.PENDING)
    operate = staticmethod(discard)
