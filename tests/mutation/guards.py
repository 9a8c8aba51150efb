"""Find every guard of the writers of delivery state in their source, and say how to take it away.

A guard is what stands between two processes, or between a message and its budget: a condition of a query, a row lock, a
condition in raw SQL, a judgement about a row in Python, and the column that a write empties or counts up.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

WRITERS = [
    "outbox/leases/*.py",
    "outbox/lanes.py",
    "outbox/operations.py",
    "outbox/retention.py",
    "outbox/database/statements.py",
    "outbox/database/shortcuts.py",
    "outbox/staging.py",
    "outbox/recording.py",
    "outbox/inserting.py",
]

WRITTEN = {"state", "due_at", "lane", "holder", "lease_token", "lapses", "spent", "attempt", "expires_at", "reason"}
COUNTED = {"attempt", "spent", "lapses"}
BOUNDED = COUNTED | {"ALONE_FROM", "max_attempts", "run"}
JUDGED = WRITTEN | BOUNDED | {"token", "floor", "clock", "digest", "route", "payload_pruned"}
FLAGS = {"charged", "refund", "stays", "leased", "lapsed", "due", "only", "solo", "alone", "recheck", "patient"}
BOUNDARIES = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
INSTEAD = '__import__("tests.mutation.instead", fromlist=["x"])'


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One guard taken away: bytes ``start`` to ``end`` of a file become ``new``.

    ``lines`` are those of the statement that it stands in; a test that runs none of them cannot notice.
    """

    path: str
    function: str
    line: int
    lines: range
    kind: str
    guard: str
    change: str
    start: int
    end: int
    new: str

    @property
    def place(self):
        return f"{self.path}:{self.line}"

    @property
    def name(self):
        """What it is, wherever it stands in its file."""
        return f"{self.path} {self.change}: {self.guard}"

    def __str__(self):
        return f"{self.place} {self.change}: {self.guard}"

    def apply(self, source):
        return source[: self.start] + self.new.encode() + source[self.end :]


def find(root):
    """All mutants of the writers below this directory, in the order of their files and lines."""
    paths = sorted(path for pattern in WRITERS for path in Path(root).glob(pattern))
    return [mutant for path in paths for mutant in Finder(path, path.relative_to(root).as_posix()).find()]


class Finder:
    """Finds the mutants of one file. Each mutant must still compile."""

    def __init__(self, path, name):
        self.name = name
        self.source = path.read_bytes()
        self.tree = ast.parse(self.source)
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.mutants = {}

    def find(self):
        for node in ast.walk(self.tree):
            for look in (self.conditions, self.locks, self.raw_sql, self.judgements, self.writes):
                look(node)
        return sorted(self.mutants.values(), key=lambda each: (each.start, each.end, each.change))

    # --- the source

    def span(self, node):
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        start, end = self.span(node)
        return self.source[start:end].decode()

    def statement(self, node):
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def function(self, node):
        while not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            node = self.parents[node]
        return getattr(node, "name", "")

    def add(self, node, kind, change, new, *, span=None, guard=None):
        start, end = span or self.span(node)
        statement = self.statement(node)
        line = self.source.count(b"\n", 0, start) + 1
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
        mutant = Mutant(
            path=self.name,
            function=self.function(node),
            line=line,
            lines=range(statement.lineno, max(last, statement.lineno) + 1),
            kind=kind,
            guard=" ".join((guard or self.source[start:end].decode()).split()),
            change=change,
            start=start,
            end=end,
            new=new,
        )
        compile(mutant.apply(self.source), self.name, "exec")
        self.mutants.setdefault((start, end, new), mutant)

    # --- conditions of queries

    def conditions(self, node):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd) and self.is_condition(node):
            for side in (node.left, node.right):
                if not isinstance(side, ast.BinOp) and called(side) != "Q":
                    self.neutral(side, keyword=None)
        if not isinstance(node, ast.Call) or called(node) not in ("filter", "exclude", "Q", "When", "get"):
            return
        for keyword in node.keywords:
            if keyword.arg not in (None, "then"):
                self.neutral(keyword, keyword=keyword.arg)
        if called(node) in ("filter", "exclude", "Q"):
            for argument in node.args:
                if not isinstance(argument, ast.BinOp | ast.Starred):
                    self.neutral(argument, keyword=None)

    def neutral(self, node, *, keyword):
        """Replace a condition by one that is always met; where it is one of several ways, also by one that never is."""
        always, never = f"{INSTEAD}.ALWAYS", f"{INSTEAD}.NEVER"
        if keyword is not None:
            always, never = "pk__isnull=False", "pk__isnull=True"
        call = self.parents[node]
        if called(call) == "exclude":
            self.add(node, "condition", "dropped", never)
            return
        self.add(node, "condition", "dropped", always)
        chooses = called(call) == "When" or isinstance(call if keyword is None else self.parents[call], ast.BinOp)
        if chooses and not isinstance(getattr(call, "op", None), ast.BitAnd):
            self.add(node, "condition", "never met", never)

    def is_condition(self, node):
        return any(called(each) in ("Q", "Exists", "Still") for each in ast.walk(node))

    # --- locks, and the helpers that guard

    def locks(self, node):
        if not isinstance(node, ast.Call):
            return
        name = called(node)
        if name == "locked":
            rows, flag = self.text(node.args[0]), [each for each in node.keywords if each.arg == "skip"]
            self.add(node, "lock", "not locked", f"({rows})")
            other = f"not ({self.text(flag[0].value)})" if flag else "False"
            self.add(node, "lock", f"skip={other}", f"{self.text(node.func)}({rows}, skip={other})")
        elif name == "successors":
            for each in node.keywords:
                if each.arg == "wait":
                    self.add(each, "lock", "the other way", f"wait=not ({self.text(each.value)})")
        elif name == "pending" and node.args:
            arguments = ", ".join(map(self.text, node.args))
            self.add(node, "condition", "in any state", f"{INSTEAD}.in_any_state({arguments})")
        elif name == "fence":
            self.add(node, "condition", "with any token", f"{INSTEAD}.with_any_token({self.text(node.args[0])})")

    # --- raw SQL

    def raw_sql(self, node):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or isinstance(self.parents[node], ast.JoinedStr):
            return
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            return
        if isinstance(self.parents[node], ast.Expr):
            return  # a docstring
        start, end = self.span(node)
        source = self.source[start:end].decode()
        for found in SQL.finditer(source):
            self.sql_condition(node, start, source, found.end())
        for found in SQL_LOCK.finditer(source):
            self.add(node, "lock", "dropped", "", span=cut(start, source, found.start(), found.end()))
        for found in SQL_SET.finditer(source):
            same = f"{found[1]} = {found[1]}"
            self.add(node, "write", "kept", same, span=cut(start, source, found.start(), found.end()))
        for found in re.finditer(r" ON CONFLICT .*? DO NOTHING", source):
            self.add(node, "condition", "dropped", "", span=cut(start, source, found.start(), found.end()))

    def sql_condition(self, node, start, source, begin):
        end = end_of_condition(source, begin)
        condition = source[begin:end]
        if not COMPARES.search(condition) or "," in re.sub(r"\([^()]*\)", "", condition):
            return  # nothing is compared, or it is a list of what is set
        span = cut(start, source, begin, end)
        if condition.endswith("="):  # the other side stands elsewhere
            self.add(node, "sql", "dropped", f"{condition[:-1]}>=", span=span)
            return
        self.add(node, "sql", "dropped", f"({condition} OR 1=1)", span=span)

    # --- judgements in Python

    def judgements(self, node):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            self.add(node.test, "check", "never", "False")
        elif isinstance(node, ast.BoolOp):
            for operand in node.values:
                if self.judges(operand):
                    self.add(operand, "judgement", "dropped", str(isinstance(node.op, ast.And)))
        elif isinstance(node, ast.Compare) and self.judges(node):
            if not isinstance(self.parents[node], ast.BoolOp | ast.Assert):
                self.add(node, "judgement", "negated", f"(not ({self.text(node)}))")
            if type(node.ops[0]) in BOUNDARIES and mentions(node, BOUNDED):
                right = " ".join([BOUNDARIES[type(node.ops[0])], self.text(node.comparators[0])])
                self.add(node, "judgement", f"now {right}", f"{self.text(node.left)} {right}")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and mentions(node.left, COUNTED):
            self.add(node, "count", "not counted", self.text(node.left))
        elif isinstance(node, ast.AugAssign) and mentions(node.target, COUNTED):
            self.add(node.value, "count", "not counted", "0", guard=self.text(node))

    def judges(self, node):
        if isinstance(self.statement(node), ast.Assert):
            return False
        if isinstance(node, ast.Compare):
            return mentions(node, JUDGED)
        if isinstance(node, ast.UnaryOp):
            return self.judges(node.operand)
        return isinstance(node, ast.Name | ast.Attribute) and mentions(node, FLAGS)

    # --- what a write empties

    def writes(self, node):
        if isinstance(node, ast.Call) and called(node) in ("update", "_change", "_update"):
            for keyword in node.keywords:
                if keyword.arg in WRITTEN:
                    alone = len(node.keywords) == 1
                    new = 'lapses=__import__("django.db.models", fromlist=["x"]).F("lapses")' if alone else ""
                    span = self.span(keyword) if alone else self.with_comma(keyword)
                    self.add(keyword, "write", "not written", new, span=span)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in WRITTEN:
                    start, (_, end) = self.span(key)[0], self.with_comma(value)
                    self.add(key, "write", "not written", "", span=(start, end))

    def with_comma(self, node):
        start, end = self.span(node)
        found = re.compile(rb"\s*,").match(self.source, end)
        return start, found.end() if found else end


FIRST = r"(?=[\w{}.]+ (?:[<>=]|IN\b|IS\b))"  # a text that begins with a condition
SQL = re.compile(rf"\b(?:WHERE|AND|ON|WHEN)\s+(?!CONFLICT)(?=[^\s])|(?<=^f\"){FIRST}|(?<=^\"){FIRST}")
SQL_END = re.compile(r"\s+(?:AND|ORDER|FOR|GROUP|LIMIT|RETURNING|WHERE|THEN|AS)\b|\s*\"|\s*\)")
SQL_LOCK = re.compile(r"(?<=\w)? ?FOR UPDATE(?: OF \w)?(?: SKIP LOCKED)?| SKIP LOCKED| LOCK IN SHARE MODE")
SQL_SET = re.compile(rf"(?<![.\w}}])({'|'.join(sorted(WRITTEN))}) = (?:NULL|0|'\w+'|\1 \+ 1)")
COMPARES = re.compile(r"[<>=]|\bIS\b|\bIN\b|\bEXISTS\b")


def end_of_condition(source, begin):
    """Where a condition ends: at the next word that is none of it, outside of brackets and of what is filled in."""
    depth, at = 0, begin
    while at < len(source):
        if source[at] in "({":
            depth += 1
        elif source[at] in ")}" and depth:
            depth -= 1
        elif not depth and SQL_END.match(source, at):
            break
        at += 1
    return at


def cut(start, source, begin, end):
    """Bytes of a file, from characters of a piece of it."""
    return start + len(source[:begin].encode()), start + len(source[:end].encode())


def called(node):
    """The last name of what is called, or None."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def mentions(node, names):
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and each.attr in names:
            return True
        if isinstance(each, ast.Name) and each.id in names:
            return True
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value in names:
            return True
    return False
