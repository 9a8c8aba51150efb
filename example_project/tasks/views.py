"""The page of the video tool: every button is one business transaction."""

from __future__ import annotations

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render

from example_project.tasks import services
from example_project.tasks.engine import engine
from example_project.tasks.models import Recording


def page(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        act(request, request.POST.get("action"))
        return redirect("tasks")
    tasks: dict[str, list[dict]] = {}
    for task in engine().tasks():
        tasks.setdefault(task["input"]["recording"], []).append(task)
    recordings = Recording.objects.order_by("-created_at")[:15]
    rows = [(recording, tasks.get(str(recording.pk), [])) for recording in recordings]
    name = "Redis Streams" if settings.REDIS_URL else "an embedded table"
    return render(request, "tasks/page.html", {"rows": rows, "engine": name, "here": "tasks"})


def act(request: HttpRequest, action: str | None) -> None:
    if action == "import_recording":
        height = 2160 if request.POST.get("height") == "2160" else 1080
        services.import_recording(request.POST["title"], height)
        messages.success(request, "Committed: the recording and its event.")
    elif action == "finish_probe":
        services.finish_probe(get_object_or_404(Recording, pk=request.POST["recording"]))
        messages.success(request, "Committed: the new state and five events, the progress in order.")
    elif action == "delete":
        services.delete(get_object_or_404(Recording, pk=request.POST["recording"]))
