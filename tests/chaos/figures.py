"""The figures of a run: what there was, what went wrong and was survived, and how quickly."""

from collections import Counter

from tests.chaos import terms as given
from tests.chaos.checker import by_lane, by_message, excuse, overlapping
from tests.chaos.evidence import LAPSED

TITLES = {
    "messages": "committed messages",
    "transactions": "transactions: committed, rolled back, without an answer",
    "states": "messages in the end",
    "executions": "executions of handlers",
    "troubles": "troubles brought",
    "deaths": "processes that died",
    "outages": "seconds without a server",
    "lapses": "leases that ran out",
    "overlaps": "overlaps of executions, explained",
    "refused": "outcomes refused by the fence",
    "order": "starts in lanes whose order could be judged",
    "exact": "messages whose charges are known exactly",
    "recovery": "recovery of what a killed process held, seconds from the kill: median, 95 %, longest",
    "early": "the same, from the end of the lease: earliest, median, 95 %",
    "prompt": "of these within lease and poll interval",
    "calm": "recovery in peace, seconds from the kill",
}


def figures(evidence):
    """Numbers and small dicts, by name: see TITLES."""
    endings = Counter(evidence.endings().values())
    starts = set(evidence.executions)
    ended = evidence.ended
    lapsed = [key for key, end in ended.items() if end["outcome"] in LAPSED]
    kinds = ("kill", "kill writer", "freeze", "stop", "cut", "restart", "crash", "stall", "slow")
    in_lanes = [each for group in by_lane(evidence) for each in group]
    return {
        "messages": len(evidence.messages),
        "transactions": {name: endings[name] for name in ("committed", "rolled back", "unknown")},
        "states": dict(Counter(_state(row) for row in evidence.messages)),
        "executions": len(evidence.executions),
        "troubles": {kind: len(evidence.by_event[kind]) for kind in kinds if evidence.by_event[kind]},
        "deaths": len(evidence.by_event["died"]),
        "outages": round(sum(line["at"] - line["since"] for line in evidence.by_event["back"]), 1),
        "lapses": {
            "running": sum(key in starts for key in lapsed),
            "not started": sum(key not in starts for key in lapsed),
            "in a row": sum(ended[key]["outcome"] == "crashed" for key in lapsed),
        },
        "overlaps": dict(_overlaps(evidence)),
        "refused": len(evidence.by_event["refused"]),
        "order": f"{sum(each.claimed is not None for each in in_lanes)} of {len(in_lanes)}",
        "exact": f"{len(evidence.messages) - len({key[0] for key in lapsed if key not in starts})} of all",
        **_recovery(evidence),
        "calm": _calm(evidence),
    }


def _state(row):
    return row["state"] + (f" ({row['reason']})" if row["reason"] else "")


def _overlaps(evidence):
    pairs = list(overlapping(evidence, by_message(evidence)))
    pairs += [(a, b) for a, b in overlapping(evidence, by_lane(evidence)) if a.id != b.id]
    return Counter(excuse(evidence, a, b.start) or excuse(evidence, b, b.start) or "UNEXPLAINED" for a, b in pairs)


def _recovery(evidence):
    """Of leases that ran out for the first time in a row, as far as the database could be asked after the kill."""
    kills = {(line["pid"], line["at"]) for line in evidence.by_event["kill"]}
    from_kill, from_end = [], []
    for line in evidence.by_event["held"]:
        end = evidence.ended.get((line["id"], line["attempt"]))
        killed = max((at for pid, at in kills if pid == line["pid"] and at <= line["at"]), default=None)
        if end is not None and end["outcome"] == "lapsed" and killed is not None:
            taken = evidence.moment(end["ended_at"])
            from_kill.append(taken - killed)
            from_end.append(taken - line["ends"])
    if not from_kill:
        return {}
    prompt = sum(each <= given.LEASE + given.POLL * 1.3 for each in from_kill)
    return {
        "recovery": [_part(from_kill, 0.5), _part(from_kill, 0.95), round(max(from_kill), 2)],
        "early": [round(min(from_end), 2), _part(from_end, 0.5), _part(from_end, 0.95)],
        "prompt": f"{prompt} of {len(from_kill)}",
    }


def _calm(evidence):
    starts = {(line["key"], line["attempt"]): line["at"] for line in evidence.by_event["start"]}
    kills = [(starts.get((line["key"], line["attempt"] + 1)), line["at"]) for line in evidence.by_event["calm kill"]]
    return [round(again - at, 2) for again, at in kills if again is not None]


def _part(values, part):
    return round(sorted(values)[min(len(values) - 1, int(part * len(values)))], 2)


def table(found, violations):
    """The figures and the verdict as lines of text."""
    for name, value in found.items():
        text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else value
        text = ", ".join(map(str, value)) if isinstance(value, list) else text
        yield f"{TITLES[name]:<60} {text}"
    for claim, broken in violations.items():
        yield f"{claim.replace('_', ' '):<60} {f'{len(broken)} VIOLATIONS' if broken else 'holds'}"
    for claim, broken in violations.items():
        for sentence in broken[:10]:
            yield f"VIOLATION ({claim.replace('_', ' ')}): {sentence}"
