"""The pages of the documentation as data: their code blocks, tables, headings and links."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<fence>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
STEP = re.compile(r"^<!-- test: (?P<step>.+) -->$", re.MULTILINE)
TEST = re.compile(r"tests/[\w/]+\.py::\w+(?:::\w+)*")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; or a step that a reader does with the mouse, whose language is "step"."""

    language: str
    body: str
    line: int


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self):
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self):
        """The text without its blocks, of which only the lines remain."""
        return FENCE.sub(lambda match: "\n" * match[0].count("\n"), self.text)

    @property
    def blocks(self):
        text = self.text
        found = [(match.start(), match["language"].strip(), match["body"]) for match in FENCE.finditer(text)]
        found += [(match.start(), "step", match["step"]) for match in STEP.finditer(self.prose_at_place())]
        return [
            Block(language=language, body=body, line=text.count("\n", 0, start) + 1)
            for start, language, body in sorted(found)
        ]

    def prose_at_place(self):
        """The text with its blocks blanked out, character by character."""
        return FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), self.text)

    def tests(self):
        """The ids of all tests that the page names."""
        return sorted(set(TEST.findall(self.text)))

    def links(self):
        """Targets of all links to files, without those of the web."""
        targets = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        return [target for target in targets if not re.match(r"[a-z]+:|#", target)]

    def headings(self, level=2):
        return re.findall(rf"^{'#' * level} (.+?)[ \t]*$", self.prose, re.MULTILINE)

    def section(self, heading, level=2):
        """The text below a heading, up to the next one of that level or a higher one."""
        pattern = rf"^{'#' * level} {re.escape(heading)}[ \t]*\n(.*?)(?=^#{{1,{level}}} |\Z)"
        match = re.search(pattern, self.text, re.MULTILINE | re.DOTALL)
        assert match, f"{self.name} has no heading {heading!r}"
        return match[1]


def rows(text):
    """The rows of all tables in a text, as lists of cells without the heads."""
    found, in_body = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            in_body = False
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            in_body = True
        elif in_body:
            found.append(cells)
    return found


def names(text):
    """The first name in backquotes of each table row."""
    return [match[1] for row in rows(text) if (match := re.match(r"`([^`]+)`", row[0]))]


def page(name):
    return Page(ROOT / name)


def all_pages():
    pages = [page(name) for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*pages, *(Page(path) for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts)]
