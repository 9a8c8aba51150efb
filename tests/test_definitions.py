"""What handler() and Topic() refuse, and when: at the definition, before any message depends on it."""

import pytest
from django.core.exceptions import ImproperlyConfigured

from outbox import RetryPolicy, Topic, handler
from outbox.handlers import registry


@pytest.fixture(autouse=True)
def _own_registry():
    with registry.isolated():
        yield


def deliver(message):
    pass


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"name": "a b"}, "'a b' is no handler name"),
        ({"name": "x" * 101}, "is no handler name"),
        ({"aliases": "old.name"}, "aliases must be a list of names, not 'old.name'"),
        ({"aliases": None}, "aliases must be a list of names, not None"),
        ({"timeout": 10**400}, "a century at most"),
        ({"aliases": ["old name"]}, "'old name' is no handler name"),
        ({"ordering": "fifo"}, "ordering must be one of"),
        ({"dead_head": "stop"}, "dead_head must be one of"),
        ({"max_attempts": 0}, "max_attempts must be a whole number"),
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": float("inf")}, "timeout must be"),
        ({"share": 0}, "share must be above 0"),
        ({"share": 1.5}, "share must be above 0"),
        ({"retry": 5}, "retry must be a RetryPolicy, not 5"),
        ({"payload_versions": ()}, "payload_versions must be"),
        ({"payload_versions": (0,)}, "payload_versions must be"),
        ({"payload_versions": ("2",)}, "payload_versions must be"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, fact):
    with pytest.raises(ImproperlyConfigured, match=fact):
        handler("order.paid", **options)
    assert registry.handlers() == ()


@pytest.mark.parametrize("topic", ["", "order paid", "order/paid", "größe", "x" * 101, None, deliver])
def test_a_topic_without_a_proper_name_is_refused(topic):
    with pytest.raises(ImproperlyConfigured, match="is no topic name"):
        handler(topic)
    with pytest.raises(ImproperlyConfigured, match="is no topic name"):
        Topic(topic)


@pytest.mark.parametrize("function", [lambda: None, lambda message, other: None, "not callable"])
def test_what_cannot_be_called_with_a_message_is_refused(function):
    with pytest.raises(ImproperlyConfigured, match="Handler 'order:paid'"):
        handler("order:paid")(function)


@pytest.mark.parametrize("function", [deliver, lambda message, more=1: None, lambda *everything: None, print])
def test_what_can_be_called_with_a_message_is_a_handler(function):
    assert handler("order.paid")(function) is function


def test_an_async_handler_cannot_be_atomic():
    async def later(message):
        pass

    with pytest.raises(ImproperlyConfigured, match="there is no async transaction"):
        handler("order.paid", atomic=True)(later)


def test_aliases_and_versions_may_come_from_any_iterable_or_be_one_number():
    handler("order.paid", aliases=(name for name in ["old"]), payload_versions=2)(deliver)
    (only,) = registry.handlers()
    assert only.routes == ("order.paid@2", "old@2")


def test_attempts_given_twice_are_those_of_the_handler():
    handler("order.paid", max_attempts=3, retry=RetryPolicy(max_attempts=9, base=1, jitter=False))(deliver)
    (only,) = registry.handlers()
    assert only.max_attempts == only.policy.max_attempts == 3
    assert only.policy.base == 1


@pytest.mark.parametrize(
    "option",
    [{"timeout": "5"}, {"timeout": 0}, {"max_attempts": "3"}, {"max_attempts": 0}, {"share": "half"}, {"share": 1.5}],
)
def test_a_bad_number_is_refused_with_the_name_of_its_handler(option):
    with pytest.raises(ImproperlyConfigured, match=r"'job'.*" + next(iter(option))):
        handler("job", **option)(lambda message: None)
