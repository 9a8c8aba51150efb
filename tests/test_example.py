"""The example project: its pages, its live feed, and the engines and queues outside that it delivers into."""

import time
import uuid
from dataclasses import replace

import pytest
from django.conf import settings as configured

from example_project import world
from example_project.ai_jobs.models import Job
from example_project.ai_jobs.queues import QueueUnreachable, RabbitQueue, TableQueue
from example_project.live import views
from example_project.live.models import Delivery
from example_project.media.models import Item
from example_project.tasks.engine import RedisEngine, TableEngine
from example_project.tasks.models import Recording
from example_project.tasks.routes import ROUTES, Task, probe, transcode

ROW = {"recording": "42", "title": "A lake", "height": 2160}


@pytest.fixture(autouse=True)
def outside(settings, tmp_path):
    """A world of this test's own: a fresh journal, names on the brokers that nobody else uses, fair weather."""
    settings.WORLD_JOURNAL = str(tmp_path / "journal.jsonl")
    settings.WORLD_NAMESPACE = f"test-{uuid.uuid4().hex[:8]}"
    settings.WORLD_LATENCY, settings.WORLD_FAULTS, settings.WORLD_DOWN = {}, 0.0, []
    return settings


# --- the world --------------------------------------------------------------------------------------------------------


def test_the_world_remembers_what_it_received():
    world.deliver("notifications", "a", {"text": "é\n"})
    world.deliver("subtitles", "b", {})
    assert [line["key"] for line in world.received()] == ["a", "b"]
    assert world.received("notifications") == [{"place": "notifications", "key": "a", "text": "é\n"}]


def test_in_bad_weather_the_first_call_fails_and_the_second_arrives(outside):
    outside.WORLD_FAULTS = 1.0
    with pytest.raises(world.Unreachable):
        world.deliver("notifications", outside.WORLD_NAMESPACE, {})
    world.deliver("notifications", outside.WORLD_NAMESPACE, {})
    assert len(world.received()) == 1


def test_a_place_that_is_down_receives_nothing(outside):
    outside.WORLD_DOWN = ["notifications"]
    for _ in range(2):
        with pytest.raises(world.Unreachable):
            world.deliver("notifications", "a", {})
    assert world.received() == []


# --- engines and queues -----------------------------------------------------------------------------------------------


@pytest.fixture(params=[TableEngine, RedisEngine])
def engine(request, outside):
    if request.param is TableEngine:
        request.getfixturevalue("db")
        yield TableEngine()
        return
    engine = RedisEngine(configured.REDIS_URL or pytest.skip("REDIS_URL names no server"))
    yield engine
    engine.forget()
    assert engine.tasks() == []
    engine.client.close()


def test_an_engine_knows_a_task_once(engine):
    task = Task(name="probe", input={"recording": "42"}, priority=3)
    engine.enqueue(task, idempotency_key="a", trace_id="first")
    engine.enqueue(replace(task, name="other"), idempotency_key="a", trace_id="second")
    engine.enqueue(task, idempotency_key="b", trace_id="third")
    assert [(t["idempotency_key"], t["name"], t["trace_id"]) for t in engine.tasks()] == [
        ("a", "probe", "first"),
        ("b", "probe", "third"),
    ]
    assert engine.tasks()[0]["input"] == {"recording": "42"}
    assert engine.tasks()[0]["priority"] == 3


@pytest.fixture(params=[TableQueue, RabbitQueue])
def queue(request, outside):
    if request.param is TableQueue:
        request.getfixturevalue("db")
        yield TableQueue()
        return
    queue = RabbitQueue(configured.RABBITMQ_URL or pytest.skip("RABBITMQ_URL names no server"))
    yield queue
    queue.forget()


def test_a_queue_knows_a_job_once(queue):
    one, other = str(uuid.uuid4()), str(uuid.uuid4())
    queue.add(one, "gpu", {"prompt": "why?"})
    queue.add(one, "gpu", {"prompt": "why?"})
    queue.add(other, "batch", {"prompt": "how?"})
    assert queue.waiting() == {one: "gpu", other: "batch"}
    assert queue.waiting() == {one: "gpu", other: "batch"}


def test_a_queue_that_does_not_answer_says_so(queue, outside):
    outside.WORLD_DOWN = ["job queue"]
    with pytest.raises(QueueUnreachable, match="job queue is down"):
        queue.add(str(uuid.uuid4()), "gpu", {})


def test_an_unreachable_broker_is_an_unreachable_queue():
    pytest.importorskip("pika")
    pytest.importorskip("pika", reason="the client of RabbitMQ is not installed")
    with pytest.raises(QueueUnreachable, match="RabbitMQ"):
        RabbitQueue("amqp://127.0.0.1:1/?connection_attempts=1&socket_timeout=1").add(str(uuid.uuid4()), "gpu", {})


# --- routes -----------------------------------------------------------------------------------------------------------


def test_a_route_makes_a_task_of_an_event():
    assert probe(ROW) == Task(name="probe", input={"recording": "42"})


@pytest.mark.parametrize(("height", "name"), [(2160, "transcode"), (1080, None)])
def test_only_uhd_is_transcoded(height, name):
    task = transcode({**ROW, "height": height})
    assert (task and task.name) == name


def test_progress_has_no_task():
    assert ROUTES["recording.progress"]({"recording": "42", "percent": 50}) is None


# --- pages ------------------------------------------------------------------------------------------------------------

PAGES = ["/", "/media/", "/tasks/", "/ai-jobs/"]


@pytest.mark.django_db
@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_on_an_empty_database(client, page, local_outside):
    response = client.get(page)
    assert response.status_code == 200
    assert "Nothing delivered yet" in response.content.decode()


@pytest.fixture
def local_outside(outside):
    """Embedded tables instead of brokers."""
    outside.REDIS_URL = outside.RABBITMQ_URL = ""


@pytest.mark.django_db
def test_a_page_shows_the_latest_deliveries(client):
    mirrored("media.requested", key="<script>")
    page = client.get("/").content.decode()
    assert "media.requested" in page
    assert "&lt;script&gt;" in page


@pytest.mark.django_db(transaction=True)
def test_every_button_of_media_is_a_transaction(client, local_outside):
    client.post("/media/", {"action": "change_of_mind", "title": "Not this"})
    assert not Item.objects.exists()
    client.post("/media/", {"action": "request", "title": "This"})
    item = Item.objects.get()
    page = client.post("/media/", {"action": "finish_download", "item": item.pk}, follow=True).content.decode()
    assert f"delivered already: media.notification:{item.pk}" in page
    assert [line["place"] for line in world.received()] == ["notifications"]
    again = client.post("/media/", {"action": "finish_download", "item": item.pk}, follow=True).content.decode()
    assert "cannot be downloaded: it is available" in again
    client.post("/media/", {"action": "remove", "item": item.pk})
    assert Item.objects.get().state == "removed"


@pytest.mark.django_db(transaction=True)
def test_a_failed_notification_is_told_and_left_to_a_dispatcher(client, outside, local_outside):
    outside.WORLD_DOWN = ["notifications"]
    client.post("/media/", {"action": "request", "title": "This"})
    item = Item.objects.get()
    page = client.post("/media/", {"action": "finish_download", "item": item.pk}, follow=True).content.decode()
    assert "the notification will follow" in page
    item.refresh_from_db()
    assert item.state == "available"


@pytest.mark.django_db(transaction=True)
def test_every_button_of_tasks_is_a_transaction(client, local_outside):
    client.post("/tasks/", {"action": "import_recording", "title": "A lake", "height": "2160"})
    recording = Recording.objects.get()
    assert recording.is_uhd
    client.post("/tasks/", {"action": "finish_probe", "recording": recording.pk})
    client.post("/tasks/", {"action": "delete", "recording": recording.pk})
    assert Recording.objects.get().state == "deleted"


@pytest.mark.django_db(transaction=True)
def test_every_button_of_ai_jobs_is_a_transaction(client, local_outside):
    client.post("/ai-jobs/", {"action": "submit", "prompt": "Why?", "queue": "gpu"})
    job = Job.objects.get()
    assert job.queue == "gpu"
    client.post("/ai-jobs/", {"action": "restart", "job": job.pk})


# --- live -------------------------------------------------------------------------------------------------------------


def mirrored(topic, *, key="k"):
    return Delivery.objects.create(topic=topic, event_key=key, handler=topic, attempt=1, worker="w")


def events(lines):
    return [line for line in lines if line.startswith("id:")]


@pytest.mark.django_db
def test_the_stream_begins_after_what_the_browser_has_seen():
    first, second, third = (mirrored("media.requested", key=str(n)) for n in range(3))
    told = events(views.news(first.pk, until=0))
    assert [line.split("\n")[0] for line in told] == [f"id: {second.pk}", f"id: {third.pk}"]
    assert '"key": "1"' in told[0]


@pytest.mark.django_db
def test_the_stream_misses_no_delivery_that_becomes_visible_late(monkeypatch):
    late, early = mirrored("media.requested", key="late"), mirrored("media.requested", key="early")
    Delivery.objects.filter(pk=late.pk).delete()

    def commit_late(seconds):
        late.save(force_insert=True)

    monkeypatch.setattr(views.time, "sleep", commit_late)
    stream = views.news(0, until=time.monotonic() + 60)
    assert "early" in next(line for line in stream if line.startswith("id:"))
    assert "late" in next(line for line in stream if line.startswith("id:"))
    assert early.pk > late.pk


@pytest.mark.django_db
def test_the_stream_is_made_of_server_sent_events(client, monkeypatch):
    monkeypatch.setattr(views, "LENGTH", -1)
    first = mirrored("media.requested")
    mirrored("media.removed")
    response = client.get("/live/stream?after=0", headers={"Last-Event-ID": str(first.pk)})
    assert response["Content-Type"] == "text/event-stream"
    (told,) = events(part.decode() for part in response.streaming_content)
    assert "event: delivered\ndata: {" in told
    assert "media.removed" in told
    assert told.endswith("\n\n")


@pytest.mark.django_db
def test_without_a_starting_point_the_stream_tells_only_what_is_new(client, monkeypatch):
    monkeypatch.setattr(views, "LENGTH", -1)
    mirrored("media.requested")
    response = client.get("/live/stream")
    assert events(part.decode() for part in response.streaming_content) == []


@pytest.mark.django_db
def test_a_starting_point_that_is_no_number_is_refused(client):
    assert client.get("/live/stream?after=x").status_code == 400
