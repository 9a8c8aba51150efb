"""``manage.py outbox_topics``: which topics this project declares, and who delivers them."""

from __future__ import annotations

from typing import Any

from outbox.handlers import Handler, registry
from outbox.management.operator import OperatorCommand
from outbox.management.printing import table

COLUMNS = ("topic", "handler", "attempts", "backoff", "timeout", "share", "ordering", "dead head", "further")


class Command(OperatorCommand):
    help = "List the declared topics with their handlers and how those treat messages."

    def run(self, options: dict[str, Any]) -> None:
        topics = registry.topics()
        data = [
            {
                "topic": name,
                "required": declared is not None and declared.required,
                "description": declared.description if declared else "",
                "handlers": [_as_data(handler) for handler in registry.handlers_of(name)],
            }
            for name, declared in topics.items()
        ]
        self.emit(data, self._lines())

    def _lines(self) -> list[str]:
        rows = []
        orphans = []
        for name, declared in registry.topics().items():
            rows += [_as_row(handler) for handler in registry.handlers_of(name)]
            if not registry.handlers_of(name):
                orphans.append(self.paint("WARNING", f"{name}: no handler, its messages wait."))
                if declared is not None and declared.required:
                    orphans.append(
                        self.paint("ERROR", f"{name} is required: no dispatcher starts without its handler.")
                    )
        if not rows and not orphans:
            return ["No topic is declared. @handler(...) or Topic(...) in an app's outbox_handlers module does it."]
        style = lambda text: self.paint("MIGRATE_HEADING", text)  # noqa: E731 - a name for one use
        left = ("topic", "handler", "backoff", "ordering", "dead head", "further")
        return [*(table(COLUMNS, rows, left=left, style=style) if rows else ()), *orphans]


def _as_data(handler: Handler) -> dict[str, Any]:
    policy = handler.policy
    return {
        "name": handler.name,
        "function": _place(handler),
        "max_attempts": policy.max_attempts,
        "backoff": {"base": policy.base, "factor": policy.factor, "cap": policy.cap, "jitter": policy.jitter},
        "timeout": handler.timeout,
        "share": handler.share,
        "ordering": handler.ordering,
        "dead_head": handler.dead_head,
        "atomic": handler.atomic,
        "async": handler.is_async,
        "batch": handler.batch,
        "payload_versions": list(handler.payload_versions),
        "aliases": list(handler.aliases),
    }


def _as_row(handler: Handler) -> tuple[object, ...]:
    policy = handler.policy
    further = [word for word, given in (("atomic", handler.atomic), ("async", handler.is_async)) if given]
    if handler.batch is not None:
        further.append(f"lists of {handler.batch}")
    if handler.payload_versions != (1,):
        further.append(f"versions {', '.join(map(str, handler.payload_versions))}")
    if handler.aliases:
        further.append(f"also {', '.join(handler.aliases)}")
    return (
        handler.topic,
        handler.name,
        policy.max_attempts,
        f"{policy.base:g} s × {policy.factor:g}, at most {policy.cap:g} s{'' if policy.jitter else ', exact'}",
        f"{handler.timeout:g} s",
        f"{handler.share:.0%}",
        handler.ordering,
        handler.dead_head,
        "; ".join(further),
    )


def _place(handler: Handler) -> str:
    function = handler.function
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
