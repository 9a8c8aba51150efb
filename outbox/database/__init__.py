"""Everything that differs between databases; no other package or module asks which one it talks to."""

from outbox.database.clock import ServerNow, now_sql, server_now, with_clock
from outbox.database.faults import LOSSES, RACES, close_quietly, code_of, is_duplicate, is_loss, is_race
from outbox.database.features import (
    OLDEST,
    can_listen,
    can_notify,
    fails_reading_before_writing,
    has_data_version,
    is_cheap_to_open,
    tables_without_transactions,
    unsupported,
)
from outbox.database.shortcuts import deliver_unlocked, increment_unlocked, lease_free
from outbox.database.statements import (
    ROUTES_PER_STATEMENT,
    Among,
    Still,
    due_candidates,
    due_routes,
    lane_heads,
    locked,
)
from outbox.database.transactions import (
    TRIES,
    Stale,
    again,
    has_open_transaction,
    impatient_transaction,
    reads_committed_now,
    short_transaction,
)

__all__ = [
    "LOSSES",
    "OLDEST",
    "RACES",
    "ROUTES_PER_STATEMENT",
    "TRIES",
    "Among",
    "ServerNow",
    "Stale",
    "Still",
    "again",
    "can_listen",
    "can_notify",
    "close_quietly",
    "code_of",
    "deliver_unlocked",
    "due_candidates",
    "due_routes",
    "fails_reading_before_writing",
    "has_data_version",
    "has_open_transaction",
    "impatient_transaction",
    "increment_unlocked",
    "is_cheap_to_open",
    "is_duplicate",
    "is_loss",
    "is_race",
    "lane_heads",
    "lease_free",
    "locked",
    "now_sql",
    "reads_committed_now",
    "server_now",
    "short_transaction",
    "tables_without_transactions",
    "unsupported",
    "with_clock",
]
