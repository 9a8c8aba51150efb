"""A writer process: does the transactions of the plan that are its own, and notes outside the database how they ended.

    python -m tests.chaos.writer WRITER FIRST

FIRST is the number of the transaction from which on it works: those before are done, or were cut short by its death.
"""

import os
import sys
import time
from datetime import timedelta

import django
from django.db import Error, connection, transaction

from tests.chaos import plan, terms
from tests.chaos.journal import note

PAUSE = 0.1


def main(writer, first):
    from outbox import stage  # deferred: needs the settings

    beginning = float(os.environ["CHAOS_BEGINNING"])
    for each in plan.make(terms.load()).transactions:
        if each.writer == writer and each.number >= first:
            time.sleep(max(0.0, beginning + each.at - time.monotonic()))
            if not transact(each, stage):
                wait_for_the_database()
    note("finished", writer=writer)


def transact(each, stage):
    """Do it; returns False if the database failed. Before the COMMIT was sent, that is as good as a rollback."""
    me = {"transaction": each.number, "writer": each.writer}
    note("begun", **me, keys=[draft.key for draft in each.drafts])
    end, sent, created = "rolled back", False, []
    try:
        with transaction.atomic():
            for draft in each.drafts:
                created += [draft.key] if put(draft, stage) else []
            time.sleep(each.pause)
            transaction.set_rollback(not each.commits)
            sent = each.commits
        end = "committed" if each.commits else "rolled back"
    except Error as error:
        end = "unknown" if sent else "rolled back"
        note(end, **me, created=created, error=f"{type(error).__name__}: {error}"[:300])
        return False
    note(end, **me, created=created)
    return True


def put(draft, stage):
    more = {"deliver_at": timedelta(seconds=draft.delay)} if draft.delay else {}
    if draft.life:
        more["expires_at"] = timedelta(seconds=draft.life)
    return stage(draft.topic, {"do": draft.do}, event_key=draft.key, ordering_key=draft.lane, **more).created


def wait_for_the_database():
    while True:
        connection.close()
        try:
            connection.ensure_connection()
        except Error:
            time.sleep(PAUSE)
        else:
            return


if __name__ == "__main__":
    django.setup()
    main(int(sys.argv[1]), int(sys.argv[2]))
