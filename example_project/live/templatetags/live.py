"""``{% live_feed %}``: the latest deliveries, kept up to date by live.js."""

from __future__ import annotations

from django import template

from example_project.live.models import Delivery

register = template.Library()


@register.inclusion_tag("live/feed.html")
def live_feed() -> dict[str, object]:
    deliveries = list(Delivery.objects.order_by("-pk")[:12])
    return {"deliveries": deliveries, "newest": deliveries[0].pk if deliveries else 0}
