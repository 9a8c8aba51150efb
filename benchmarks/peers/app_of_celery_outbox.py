"""The Celery application of `on_celery_outbox`, which a setting names by its path."""

from django_celery_outbox import OutboxCelery

app = OutboxCelery("benchmark", broker="memory://")


@app.task(name="noop", ignore_result=True)
def noop(order_id: int) -> None:
    """Never run: the relay only hands it to the broker."""
