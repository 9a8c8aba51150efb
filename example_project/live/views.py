"""The front page, and the stream of server-sent events behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from example_project.ai_jobs.models import Job
from example_project.live.models import Delivery
from example_project.media.models import Item
from example_project.tasks.models import Recording

POLL = 0.3  # seconds between two looks at the mirror
LENGTH = 60  # seconds until a stream ends and the browser opens the next one, where this one ended
WINDOW = 50  # ids that may become visible after a higher one, when dispatchers commit at the same time


@require_GET
def page(request: HttpRequest) -> HttpResponse:
    counts = {"items": Item.objects.count(), "recordings": Recording.objects.count(), "jobs": Job.objects.count()}
    return render(request, "live/page.html", counts)


@require_GET
def stream(request: HttpRequest) -> HttpResponse:
    """Everything delivered after ``?after=``, or after the last event that this browser has seen, and what follows.

    Made for WSGI servers with threads, such as runserver: each open page occupies one.
    """
    last = request.headers.get("Last-Event-ID") or request.GET.get("after") or newest()
    try:
        after = int(last)
    except ValueError:
        return HttpResponseBadRequest(f"{last!r} is no number of an event.")
    events = news(after, until=time.monotonic() + LENGTH)
    return StreamingHttpResponse(events, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def news(after: int, until: float) -> Iterator[str]:
    """Server-sent events of what is new, each once, for as long as ``until`` allows."""
    yield "retry: 1000\n\n"
    seen: set[int] = set()
    while True:
        floor = max(after, max(seen, default=0) - WINDOW)
        seen = {number for number in seen if number > floor}
        for delivery in Delivery.objects.filter(pk__gt=floor).exclude(pk__in=seen).order_by("pk"):
            seen.add(delivery.pk)
            yield f"id: {delivery.pk}\nevent: delivered\ndata: {json.dumps(delivery.as_json())}\n\n"
        if time.monotonic() > until:
            return
        time.sleep(POLL)
        yield ": still here\n\n"  # tells the server when the browser has gone


def newest() -> int:
    return Delivery.objects.order_by("pk").values_list("pk", flat=True).last() or 0
