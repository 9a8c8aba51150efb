"""What a mutant puts in the place of a guard; only scratch copies of the package import this."""

from django.db.models import Q

from outbox.models import Message

ALWAYS = Q(pk__isnull=False)
NEVER = Q(pk__isnull=True)


def in_any_state(using, ids):
    """`lanes.pending` without the state."""
    return Message.objects.using(using).filter(pk__in=list(ids))


def with_any_token(pairs):
    """`fence` without the tokens, and without the state."""
    return Q(pk__in=[pk for pk, _ in pairs])
