"""Who delivers the events of the media manager: those of one topic in order, different topics side by side."""

from __future__ import annotations

import asyncio

from example_project import world
from example_project.media import topics
from outbox import RetryPolicy, handler

# 1, 2, 4, 8 seconds; dead at the fifth failure.
PATIENCE = RetryPolicy(max_attempts=5, base=1, factor=2, cap=3600, jitter=False)


def tell_listeners(message):
    """One function for all eleven events: the message says which one it is."""
    world.deliver("listeners", message.event_key, {"event": message.topic, **message.payload})


for topic in topics.EVENTS:
    handler(topic, ordering="topic", retry=PATIENCE, timeout=60)(tell_listeners)


# Too urgent to wait behind an earlier one that fails: unordered.
@handler(topics.NOTIFICATION, ordering="none", retry=PATIENCE, timeout=60)
def notify(message):
    # The event key goes along: if we die before this delivery is recorded, the gateway recognises the repetition.
    world.deliver("notifications", message.event_key, {"text": f"{message.payload['title']} is here."})


@handler(topics.MODULE, ordering="topic", retry=PATIENCE, timeout=60)
def scan_folder(message):
    world.deliver("media server", message.event_key, {"scan": message.payload["item"]})


@handler(topics.SUBTITLE, ordering="topic", retry=PATIENCE, timeout=60)
async def find_subtitles(message):
    await asyncio.to_thread(world.deliver, "subtitles", message.event_key, {"title": message.payload["title"]})
