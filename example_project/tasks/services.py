"""The transactions of the video tool."""

from __future__ import annotations

import uuid

from django.db import transaction

from example_project.tasks.models import Recording
from outbox import Intent, stage, stage_many


def import_recording(title: str, height: int, *, trace_id: str = "") -> Recording:
    """Take over a recording. The trace of the request that brought it goes along in the headers."""
    with transaction.atomic():
        recording = Recording.objects.create(title=title, height=height)
        stage(
            "recording.imported",
            facts(recording),
            event_key=f"recording:{recording.pk}:imported",
            ordering_key=str(recording.pk),
            headers={"trace_id": trace_id or uuid.uuid4().hex},
        )
    return recording


def finish_probe(recording: Recording) -> None:
    """Note that a recording was looked at. Its four steps of progress have one ordering key: they are told in order."""
    with transaction.atomic():
        recording.state = Recording.State.PROBED
        recording.save(update_fields=["state"])
        stage_many(
            Intent(
                "recording.progress",
                {"recording": str(recording.pk), "percent": percent},
                event_key=f"recording:{recording.pk}:progress:{percent}",
                ordering_key=str(recording.pk),
            )
            for percent in (25, 50, 75, 100)
        )
        stage(
            "recording.probed",
            facts(recording),
            event_key=f"recording:{recording.pk}:probed",
            ordering_key=str(recording.pk),
        )


def delete(recording: Recording) -> None:
    """Mark a recording as deleted; the engine cleans up after it."""
    with transaction.atomic():
        recording.state = Recording.State.DELETED
        recording.save(update_fields=["state"])
        stage(
            "recording.deleted",
            facts(recording),
            event_key=f"recording:{recording.pk}:deleted",
            ordering_key=str(recording.pk),
        )


def facts(recording: Recording) -> dict[str, str | int]:
    return {"recording": str(recording.pk), "title": recording.title, "height": recording.height}
