"""Fixtures for pytest, next to the functions of `outbox.testing`; an entry point loads them in every project.

Models are imported by the fixtures alone, so that projects without the app, or without Django, are left in peace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from outbox.registry import Registry


@pytest.fixture
def outbox_drain(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`outbox.testing.drain`: deliver what is due, in this thread. The test needs database access."""
    drain: Callable[..., Any] = _testing(request).drain
    return drain


@pytest.fixture
def outbox_staged(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`outbox.testing.staged_messages`: what was staged so far. The test needs database access."""
    staged_messages: Callable[..., Any] = _testing(request).staged_messages
    return staged_messages


@pytest.fixture
def outbox_registry(request: pytest.FixtureRequest) -> Iterator[Registry]:
    """An empty registry for the length of the test, for handlers that the test itself registers."""
    with _testing(request).isolated_registry() as registry:
        yield registry


def _testing(request: pytest.FixtureRequest) -> Any:
    from django.apps import apps  # deferred, as said above

    if not apps.ready or not apps.is_installed("outbox"):
        pytest.fail(f"The fixture {request.fixturename!r} needs 'outbox' in INSTALLED_APPS, and pytest-django.")
    return import_module("outbox.testing")
