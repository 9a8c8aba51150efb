"""Guards that may be taken away without anybody being able to tell, each with its reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """A guard that only saves work or is a second line of defence. ``on``: the databases of which that is true."""

    path: str
    function: str
    guard: str
    change: str
    why: str
    on: tuple[str, ...] = ("sqlite", "postgresql", "mysql")

    def matches(self, mutant):
        names = ("path", "function", "guard", "change")
        return all(getattr(self, name) == getattr(mutant, name) for name in names)


EQUIVALENT = [
    Equivalent(
        path="outbox/database/statements.py",
        function="lane_heads",
        guard="p.lane IS NOT NULL",
        change="dropped",
        why="A row in no lane yields a line for the lane NULL, and nobody asks for that.",
    ),
    Equivalent(
        path="outbox/database/statements.py",
        function="lane_heads",
        guard="h.lane = p.lane",
        change="dropped",
        why="The WHERE says the same; only PostgreSQL, which searches by >=, needs it.",
        on=("sqlite", "mysql"),
    ),
    Equivalent(
        path="outbox/database/shortcuts.py",
        function="_delivered",
        guard="lapses = 0",
        change="kept",
        why="Only first attempts are delivered here, and no lease of theirs ever lapsed.",
    ),
    Equivalent(
        path="outbox/inserting.py",
        function="_insert_or_find_chunk",
        guard="refusal is not None and len(rows) == len(left)",
        change="never",
        why="Where ON CONFLICT is known, every refusal was raised before.",
        on=("sqlite", "postgresql"),
    ),
    Equivalent(
        path="outbox/inserting.py",
        function="_insert_or_find_chunk",
        guard="_skips(connection) or not database.is_duplicate(connection, error)",
        change="never",
        why="A refusal that no duplicate explains is raised after a look, too; PostgreSQL cannot look any more.",
        on=("sqlite", "mysql"),
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="_judge",
        guard="not due",
        change="dropped",
        why="Who sleeps behind a lapsed holder is woken by its settlement, as behind a live one.",
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="_judge",
        guard="target.lease_token is not None",
        change="dropped",
        why="With one writer a row below the oldest cannot appear between two statements.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="_judge",
        guard="row.pk > floor",
        change="dropped",
        why="With one writer a row below the oldest cannot appear between two statements.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="targets",
        guard="Among(missing)",
        change="dropped",
        why="It locks more rows than it needs, which matters where rows are locked.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="successors",
        guard="Among(ids)",
        change="dropped",
        why="It locks more rows than it needs, which matters where rows are locked.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="_more",
        guard="pending(using, ids)",
        change="in any state",
        why="Parking and snoozing say it again; this look only saves locks.",
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="_more",
        guard="due_at__lte=ServerNow()",
        change="dropped",
        why="Parking and snoozing say it again; this look only saves locks.",
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="advance",
        guard="pk__in=ids",
        change="dropped",
        why="The first of the lane is the same row; by its key it is found at a flat cost.",
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="advance",
        guard="attempt=head.attempt",
        change="dropped",
        why="A row that was leased and given back meanwhile, and sleeps as before, is woken like any other.",
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="advance",
        guard="head.due_at <= head.clock",
        change="dropped",
        why="A row that is due already is a knock: to lock it is as good as to update it with what it holds.",
    ),
    Equivalent(
        path="outbox/database/shortcuts.py",
        function="_unlocked",
        guard="p.id = ANY(%s::bigint[])",
        change="dropped",
        why="The join says the same; told the ids twice, PostgreSQL finds the rows by their index.",
        on=("postgresql",),
    ),
    Equivalent(
        path="outbox/leases/looking.py",
        function="choose",
        guard="row.lane is not None",
        change="dropped",
        why="The statement that leases without a look repeats it; who knows before saves that statement.",
    ),
    Equivalent(
        path="outbox/leases/looking.py",
        function="_units",
        guard="row.lane is not None",
        change="dropped",
        why="No lane is never a key of what is grouped by lane.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="_sort",
        guard="Among(missing)",
        change="dropped",
        why="It asks for more rows than it needs.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="_was_ours",
        guard="row.lease_token is None",
        change="dropped",
        why="Each lease counts an attempt, so a row with another lease than ours has another attempt.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="_recognised",
        guard="state=State.PENDING",
        change="dropped",
        why="What is settled carries no token.",
    ),
    Equivalent(
        path="outbox/leases/shortcut.py",
        function="leased_unanswered",
        guard="pending(terms.using, chosen)",
        change="in any state",
        why="What is settled carries no token.",
    ),
    Equivalent(
        path="outbox/leases/taking.py",
        function="_judge",
        guard="row.due_at is None",
        change="dropped",
        why="Waking passes by what does not sleep.",
    ),
    Equivalent(
        path="outbox/operations.py",
        function="_in_flight",
        guard="row.state == State.PENDING",
        change="dropped",
        why="What is settled carries no token.",
    ),
    Equivalent(
        path="outbox/operations.py",
        function="_is_due",
        guard="row.due_at is not None",
        change="dropped",
        why="It is asked of rows with a token, and those have a due time.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_each_batch",
        guard="settled_at__gte=floor",
        change="dropped",
        why="It passes over rows that are gone, but not yet vacuumed away.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="settle",
        guard="recheck",
        change="dropped",
        why="What a lost commit has settled carries no token, so the statement finds nothing.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="_recognised",
        guard="locked(ours, skip=False)",
        change="not locked",
        why="What comes of it is a lease, and its token fences it like any other.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="_may_follow",
        guard="head.lease_token is not None",
        change="dropped",
        why="A lane has one holder, and that is whom we settle: its next row carries no token.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_change",
        guard='locked(Message.objects.using(run.using).filter(pk__in=ids).order_by("pk"))',
        change="not locked",
        why="The change itself meets the lock, gives up after a second and is done in parts; this saves the second.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_change",
        guard='locked(Message.objects.using(run.using).filter(pk__in=ids).order_by("pk"))',
        change="skip=False",
        why="It gives up after a second, and is done in smaller parts; to pass by at once saves the second.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_stranded",
        guard="m.id = h.head",
        change="dropped",
        why="The UPDATE that wakes passes by what does not sleep.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_stranded",
        guard="m.state = %s",
        change="dropped",
        why="The UPDATE that wakes repeats it.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_stranded",
        guard="m.due_at IS NULL",
        change="dropped",
        why="The UPDATE that wakes repeats it.",
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_change",
        guard="pk__in=ids",
        change="dropped",
        why="It locks more rows than it needs, which matters where rows are locked.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/retention.py",
        function="_each_batch",
        guard="pk__in=run.busy",
        change="dropped",
        why="No row is ever locked by somebody else there.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/operations.py",
        function="_batch",
        guard="pk__in=ids",
        change="dropped",
        why="It locks more rows than it needs, which matters where rows are locked.",
        on=("sqlite",),
    ),
    Equivalent(
        path="outbox/inserting.py",
        function="_find",
        guard="LOCK IN SHARE MODE",
        change="dropped",
        why="Only MySQL and MariaDB are asked so.",
        on=("postgresql",),
    ),
    Equivalent(
        path="outbox/lanes.py",
        function="advance",
        guard="lane=lane",
        change="dropped",
        why="The lock that follows repeats it.",
    ),
    Equivalent(
        path="outbox/leases/lease.py",
        function="grant",
        guard="row.lane is not None",
        change="dropped",
        why="Without a lane there is no holder, whether it is copied from the lane or left empty.",
    ),
    Equivalent(
        path="outbox/leases/runs.py",
        function="extend",
        guard="terms.solo",
        change="dropped",
        why="A claim of one message has no room for others.",
    ),
    Equivalent(
        path="outbox/leases/settling.py",
        function="_go_on",
        guard="row.lane is not None",
        change="dropped",
        why="Without a lane there is no head, and no turn is noted.",
    ),
]
