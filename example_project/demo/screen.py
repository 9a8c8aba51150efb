"""What the demo shows: steps, a progress line that redraws itself on a terminal, and tables."""

from __future__ import annotations

import shutil
import time
from typing import Any

BAR = 24
WIDEST = 100  # columns


class Screen:
    def __init__(self, stdout: Any, style: Any) -> None:
        self.stdout = stdout
        self.style = style
        self.redraws = stdout.isatty()
        self.began = time.monotonic()
        self._drawn = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def title(self, text: str) -> None:
        self.write(f"\n{self.style.MIGRATE_HEADING(text)}")

    def done(self, text: str) -> None:
        self._step(self.style.SUCCESS("✓"), text)

    def shock(self, text: str) -> None:
        self._step(self.style.ERROR("✗"), text)

    def verdict(self, good: bool, text: str) -> None:
        self.write(f"  {self.style.SUCCESS('✓') if good else self.style.ERROR('✗')} {text}")

    def write(self, text: str = "") -> None:
        self._wipe()
        self.stdout.write(text)

    def progress(self, done: int, total: int, text: str) -> None:
        """Show how far it is: redrawn in place on a terminal, elsewhere a line for every quarter."""
        full = BAR * done // max(total, 1)
        line = f"    {'█' * full}{'░' * (BAR - full)}  {done:,} of {total:,} settled{text}"
        if self.redraws:
            width = shutil.get_terminal_size().columns - 1
            self.stdout.write("\r\033[K" + line[:width], ending="")
            self.stdout.flush()
            self._drawn = line
        elif (quarter := line[4 : 4 + BAR : BAR // 4]) != self._drawn:
            self.stdout.write(line)
            self._drawn = quarter

    def table(self, head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        """The first column stands to the left, the others to the right."""
        widths = [max(len(number(cell)) for cell in column) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            first, *others = map(number, row)
            cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
            self.write(f"    {'   '.join(cells)}")

    def _step(self, mark: str, text: str) -> None:
        width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns) - 13
        self.write(f"  {mark} {text:<{width}} {self.seconds:5.1f} s")

    def _wipe(self) -> None:
        if self.redraws and self._drawn:
            self.stdout.write("\r\033[K", ending="")
        self._drawn = ""


def number(cell: Any) -> str:
    """Digits in groups of three, and zeros that step back."""
    return "·" if cell == 0 else f"{cell:,}" if isinstance(cell, int) else str(cell)
