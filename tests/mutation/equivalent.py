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


EQUIVALENT = []
