"""The transactions of the media manager: each changes an item and stages what happened, both or neither."""

from __future__ import annotations

from functools import partial
from uuid import UUID

from django.db import transaction

from example_project.media.models import Item
from example_project.media.outbox_handlers import notify
from example_project.media.topics import DOWNLOAD_FINISHED, EFFECTS, NOTIFICATION, REMOVED, REQUESTED
from outbox import DurableCommand, Effect, Intent, PostCommitResult, Staged, Topic, stage


def request(title: str) -> Item:
    """Wish for an item."""
    with transaction.atomic():
        item = Item.objects.create(title=title)
        happened(REQUESTED, item)
    return item


def remove(item: Item) -> None:
    """Take an item out of the library."""
    with transaction.atomic():
        item.state = Item.State.REMOVED
        item.save(update_fields=["state"])
        happened(REMOVED, item)


def happened(topic: Topic, item: Item) -> Staged:
    """Stage an event of an item in the caller's transaction. Said twice, it happened once: the event key decides."""
    return stage(topic, facts(item), event_key=key(topic, item))


def finish_download(item_id: UUID) -> PostCommitResult[Item]:
    """Put an item into the library, and notify at once.

    Raises PostCommitEffectError when it is in the library, but the notification has to wait for a dispatcher.
    """
    return DurableCommand().execute(partial(_finish_download, item_id), what_follows)


async def afinish_download(item_id: UUID) -> PostCommitResult[Item]:
    """The same from asynchronous code: the business part still runs as one synchronous piece, in one transaction."""
    return await DurableCommand().aexecute(partial(_finish_download, item_id), what_follows)


def _finish_download(item_id: UUID) -> Item:
    item = Item.objects.select_for_update().get(pk=item_id)
    if item.state != Item.State.REQUESTED:
        raise ValueError(f"{item} cannot be downloaded: it is {item.state}.")
    item.state = Item.State.AVAILABLE
    item.save(update_fields=["state"])
    return item


def what_follows(item: Item) -> tuple[Effect, ...]:
    """The event and its three effects. Only the notification is so urgent that it does not wait for a dispatcher."""
    return tuple(
        Effect(
            Intent(topic, facts(item), event_key=key(topic, item)),
            deliver=notify if topic is NOTIFICATION else None,
        )
        for topic in (DOWNLOAD_FINISHED, *EFFECTS)
    )


def facts(item: Item) -> dict[str, str]:
    return {"item": str(item.pk), "title": item.title}


def key(topic: Topic, item: Item) -> str:
    """The name of this event: the same whenever it is staged or delivered again."""
    return f"{topic.name}:{item.pk}"
