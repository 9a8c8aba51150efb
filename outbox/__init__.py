"""A transactional outbox for Django: what shall happen is stored with the business data, or not at all.

::

    with transaction.atomic():                      # 1. stage in your own transaction
        order = Order.objects.create(...)
        stage("order.paid", {"order_id": order.pk}, event_key=f"order:{order.pk}:paid")

    @handler("order.paid", max_attempts=8)          # 2. shop/outbox_handlers.py, found automatically
    def send_receipt(message): ...

    $ python manage.py outbox_dispatch              # 3. delivers after the commit, whatever dies in between
"""

from importlib import import_module
from typing import TYPE_CHECKING

from outbox.exceptions import (
    Bury,
    Discard,
    EventKeyConflict,
    InvalidPayload,
    LeaseLost,
    NotInTransaction,
    OutboxError,
    PostCommitEffectError,
    Retry,
    Snooze,
    Unavailable,
    UnknownTopic,
)
from outbox.handlers import Topic, handler
from outbox.retries import RetryPolicy
from outbox.version import __version__ as __version__

if TYPE_CHECKING:
    from outbox.durable import DurableCommand, Effect, PostCommitResult
    from outbox.intents import Intent
    from outbox.recording import Staged
    from outbox.staging import astage, stage, stage_many

__all__ = [
    "Bury",
    "Discard",
    "DurableCommand",
    "Effect",
    "EventKeyConflict",
    "Intent",
    "InvalidPayload",
    "LeaseLost",
    "NotInTransaction",
    "OutboxError",
    "PostCommitEffectError",
    "PostCommitResult",
    "Retry",
    "RetryPolicy",
    "Snooze",
    "Staged",
    "Topic",
    "Unavailable",
    "UnknownTopic",
    "astage",
    "handler",
    "stage",
    "stage_many",
]

# These need models, which may be imported only once the apps are loaded; "import outbox" must work before that.
_NEED_MODELS = {
    "DurableCommand": "outbox.durable",
    "Effect": "outbox.durable",
    "PostCommitResult": "outbox.durable",
    "Intent": "outbox.intents",
    "Staged": "outbox.recording",
    "astage": "outbox.staging",
    "stage": "outbox.staging",
    "stage_many": "outbox.staging",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_MODELS:
        raise AttributeError(f"module 'outbox' has no attribute {name!r}")
    value = getattr(import_module(_NEED_MODELS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
