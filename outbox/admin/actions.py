"""What people set off from the list or from a message's page: confirm, do, log, and tell exactly what was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.text import get_text_list
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from outbox import operations
from outbox.admin import selection
from outbox.admin.places import Place, badge, place_of
from outbox.admin.selection import Selection
from outbox.admin.shown import key_tag, middle, number, plain, short
from outbox.admin.verbs import DISCARD, MAKE_DUE, ORDER_IS_GIVEN_UP, REQUEUE, Deed, leaves_its_order
from outbox.models import Message, Verb
from outbox.texts import storable

if TYPE_CHECKING:
    from outbox.admin.messages import MessageAdmin

SAMPLES = 5  # messages that a confirmation shows
NAMED = 3  # skipped messages that are named for each reason
KEY_LENGTH = 48
NOTE_LENGTH = 1000


@admin.action(permissions=["requeue"], description=MAKE_DUE.label)
def make_due(modeladmin: MessageAdmin, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
    return _confirm_or_do(MAKE_DUE, modeladmin, request, queryset)


@admin.action(permissions=["requeue"], description=REQUEUE.label)
def requeue(modeladmin: MessageAdmin, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
    return _confirm_or_do(REQUEUE, modeladmin, request, queryset)


@admin.action(permissions=["discard"], description=DISCARD.label)
def discard(modeladmin: MessageAdmin, request: HttpRequest, queryset: QuerySet[Message]) -> HttpResponse | None:
    return _confirm_or_do(DISCARD, modeladmin, request, queryset)


def _confirm_or_do(
    deed: Deed, modeladmin: MessageAdmin, request: HttpRequest, queryset: QuerySet[Message]
) -> HttpResponse | None:
    """One message is dealt with at once, unless it loses its order by it; several are confirmed first."""
    chosen = selection.of_action(request, queryset, modeladmin.get_queryset(request))
    disordered = [row for row in chosen.at(deed.places) if leaves_its_order(row)] if deed is REQUEUE else []
    if "confirmed" not in request.POST and (len(chosen.rows) > 1 or disordered):
        return _confirmation(deed, modeladmin, request, chosen, disordered)
    do(deed, modeladmin, request, chosen)
    return None


def _confirmation(
    deed: Deed, modeladmin: MessageAdmin, request: HttpRequest, chosen: Selection, disordered: Sequence[Message]
) -> HttpResponse:
    affected = chosen.at(deed.places)
    context: dict[str, Any] = {
        **modeladmin.admin_site.each_context(request),
        "title": deed.question % {"rows": len(affected), "count": number(len(affected))},
        "opts": modeladmin.opts,
        "media": modeladmin.media,
        "deed": deed,
        "affected": number(len(affected)) if affected else "",
        "samples": [_sample(modeladmin, row) for row in affected[:SAMPLES]],
        "more": number(len(affected) - SAMPLES) if len(affected) > SAMPLES else "",
        "left_alone": _left_alone(chosen.elsewhere(deed.places), len(chosen.missing)),
        "order_note": _order_note(len(disordered)),
        "ids": ",".join(map(str, [*chosen.ids, *chosen.missing])),
        "ids_field": selection.IDS,
        "first": str(chosen.ids[0]),
        "action": request.POST.getlist("action")[0],
        "action_checkbox_name": ACTION_CHECKBOX_NAME,
        "back": request.get_full_path(),
    }
    request.current_app = modeladmin.admin_site.name
    return TemplateResponse(request, "admin/outbox/message/confirm.html", context)


def _sample(modeladmin: MessageAdmin, row: Message) -> dict[str, Any]:
    return {
        "key": key_tag(row.event_key, KEY_LENGTH),
        "topic": row.topic,
        "badge": badge(place_of(row, row.clock)),
        "error": short(row.error_type, KEY_LENGTH),
    }


def _left_alone(elsewhere: Mapping[Place, int], missing: int) -> str:
    """``12 others are left alone: 10 delivered, 2 in flight.``"""
    parts = [f"{number(count)} {place.label}" for place, count in elsewhere.items()]
    if missing:
        parts.append(_("%(count)s deleted") % {"count": number(missing)})
    total = sum(elsewhere.values()) + missing
    if not total:
        return ""
    return ngettext(
        "%(count)s of the selected messages is left alone: %(what)s.",
        "%(count)s of the selected messages are left alone: %(what)s.",
        total,
    ) % {"count": number(total), "what": ", ".join(parts)}


def _order_note(count: int) -> str:
    if not count:
        return ""
    return ngettext(
        "%(count)s of them gives up its order: its lane may have gone on without it, and later messages of it may "
        "already be delivered.",
        "%(count)s of them give up their order: their lanes may have gone on without them, and later messages of them "
        "may already be delivered.",
        count,
    ) % {"count": number(count)}


def do(deed: Deed, modeladmin: MessageAdmin, request: HttpRequest, chosen: Selection) -> operations.Done:
    """Do it, write a LogEntry for each message that changed, and tell the numbers as they are."""
    ids = [*chosen.ids, *chosen.missing]
    note = storable(request.POST.get("note", "").strip(), NOTE_LENGTH)
    done = deed.run(modeladmin.alias, ids, actor=request.user.get_username(), note=note)
    changed = set(done.done)
    rows = [row for row in chosen.rows if row.pk in changed]
    _log(deed, request, rows, note)
    count = len(done.done)
    if count:
        text = deed.did % {"rows": count, "count": number(count)}
        if deed.verb == Verb.REQUEUE and count == 1 and leaves_its_order(rows[0]):
            text = f"{text} {ORDER_IS_GIVEN_UP}"
        modeladmin.message_user(request, text, messages.SUCCESS)
    if done.skipped:
        keys = {row.pk: middle(plain(row.event_key), KEY_LENGTH) for row in chosen.rows}
        modeladmin.message_user(request, skipped_text(done.skipped, keys), messages.WARNING)
    return done


def _log(deed: Deed, request: HttpRequest, rows: Sequence[Message], note: str) -> None:
    text = f"{deed.log} {note}".strip()
    for start in range(0, len(rows), selection.CHUNK):
        chunk = rows[start : start + selection.CHUNK]
        LogEntry.objects.log_actions(request.user.pk, chunk, CHANGE, text)  # type: ignore[arg-type]


def skipped_text(skipped: Mapping[int, str], keys: Mapping[int, str]) -> str:
    """``3 messages were left alone: order:1, order:2 (delivered), order:7 (in flight).``"""
    by_reason: dict[str, list[int]] = {}
    for pk, reason in skipped.items():
        by_reason.setdefault(str(operations.Refusal(reason).label), []).append(pk)
    parts = []
    for reason, ids in by_reason.items():
        names = [keys.get(pk, f"#{pk}") for pk in ids[:NAMED]]
        if len(ids) > NAMED:
            names.append(_("%(count)s more") % {"count": number(len(ids) - NAMED)})
        parts.append(f"{get_text_list(names, _('and'))} ({reason})")
    return ngettext(
        "%(count)s message was left alone: %(what)s.", "%(count)s messages were left alone: %(what)s.", len(skipped)
    ) % {"count": number(len(skipped)), "what": "; ".join(parts)}
