"""The page of the job service: every button is one business transaction."""

from __future__ import annotations

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render

from example_project.ai_jobs import services
from example_project.ai_jobs.models import Job
from example_project.ai_jobs.queues import ALLOWED_QUEUES, job_queue


def page(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        act(request, request.POST.get("action"))
        return redirect("ai_jobs")
    waiting = job_queue().waiting()
    rows = [(job, waiting.get(str(job.pk))) for job in Job.objects.order_by("-created_at")[:15]]
    backend = "RabbitMQ" if settings.RABBITMQ_URL else "an embedded table"
    return render(
        request,
        "ai_jobs/page.html",
        {"rows": rows, "queues": ALLOWED_QUEUES, "backend": backend, "here": "ai_jobs"},
    )


def act(request: HttpRequest, action: str | None) -> None:
    if action == "submit":
        services.submit(request.POST["prompt"], request.POST.get("queue", ""))
        messages.success(request, "Committed: the job and its event.")
    elif action == "restart":
        services.restart(get_object_or_404(Job, pk=request.POST["job"]))
        messages.success(request, "Committed: the event. While the job waits in its queue, nothing changes there.")
