"""The task of `on_tasks_db`, which must be found by the name of its module."""

from django.tasks import task

handled = 0


@task()
def noop(order_id: int) -> None:
    global handled
    handled += 1
