"""The page of the media manager: every button is one business transaction."""

from __future__ import annotations

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render

from example_project import world
from example_project.media import services
from example_project.media.models import Item
from outbox import PostCommitEffectError


class ChangedMind(Exception):
    """The caller's transaction ends without a commit."""


def page(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        act(request, request.POST.get("action"))
        return redirect("media")
    return render(request, "media/page.html", {"rows": rows(), "here": "media"})


def rows() -> list[tuple[Item, list[tuple[str, str]]]]:
    """The latest items, each with what the world outside received about it: (event, place)."""
    outside: dict[str, list[tuple[str, str]]] = {}
    for line in world.received():
        topic, _, item_id = line["key"].partition(":")
        outside.setdefault(item_id, []).append((topic.removeprefix("media."), line["place"]))
    return [(item, outside.get(str(item.pk), [])) for item in Item.objects.order_by("-created_at")[:15]]


def act(request: HttpRequest, action: str | None) -> None:
    if action == "request":
        services.request(request.POST["title"])
        messages.success(request, "Committed: the item and its event, both or neither.")
    elif action == "change_of_mind":
        change_of_mind(request.POST["title"])
        messages.warning(request, "Rolled back: neither the item nor its event exists.")
    elif action == "remove":
        services.remove(get_object_or_404(Item, pk=request.POST["item"]))
    elif action == "finish_download":
        try:
            result = services.finish_download(get_object_or_404(Item, pk=request.POST["item"]).pk)
        except PostCommitEffectError as error:
            messages.warning(request, f"In the library; the notification will follow. {error}")
        except ValueError as error:
            messages.error(request, str(error))
        else:
            messages.success(request, f"In the library; delivered already: {', '.join(result.completed_effects)}.")


def change_of_mind(title: str) -> None:
    try:
        with transaction.atomic():
            services.request(title)
            raise ChangedMind
    except ChangedMind:
        pass  # the transaction is undone: that is all there is to show
