"""The tutorial, done word for word: its files are written, its commands run, and what they print is compared."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

from tests.documents import ROOT, page

TUTORIAL = page("docs/tutorial/first-message.md")
LEFT_OUT = ("python3 -m venv", ". .venv/bin/activate", "pip install", "python manage.py runserver")
# What a block of an interactive shell needs around it; a difference is printed and is the exit code.
SHELL = """
import django, doctest, sys
django.setup()
test = doctest.DocTestParser().get_doctest(sys.stdin.read(), {}, "tutorial", None, 0)
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL).run(test).failed)
"""
STEPS = {
    "requeue in the admin": """
        import django
        django.setup()
        from pathlib import Path
        from django.test import Client
        Path("elsewhere").rename("receipts")
        client = Client(headers={"host": "localhost"})
        assert client.login(username="ada", password="correct-horse")
        assert b"order:2:paid" in client.get("/admin/outbox/message/", {"place": "dead"}).content
        page = client.get("/admin/outbox/message/3/change/")
        assert page.status_code == 200 and page.content.count(b"FileNotFoundError") >= 2
        assert client.post("/admin/outbox/message/3/change/", {"verb": "requeue"}).status_code == 302
    """,
}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_works_word_for_word(tmp_path, database_kind):
    if database_kind != "sqlite":
        pytest.skip("The tutorial's project brings a SQLite file of its own; once is enough.")
    reader = Reader(tmp_path)
    for block in TUTORIAL.blocks:
        reader.do(block)
    assert not reader.unused_steps()


class Reader:
    """Somebody who does what the page says, in an empty folder."""

    def __init__(self, folder):
        self.folder = folder
        self.steps = dict(STEPS)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "PYTEST", "OUTBOX"))
        }
        self.environment = {
            **kept,
            "PATH": f"{self._tools()}{os.pathsep}{kept['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }

    def do(self, block):
        getattr(self, f"_{block.language}")(block)

    def unused_steps(self):
        return list(self.steps)

    def _tools(self):
        """A folder with ``python`` and ``django-admin``, as an activated environment has them."""
        tools = self.folder / ".tools"
        tools.mkdir()
        for name, arguments in (("python", ""), ("django-admin", " -m django")):
            script = tools / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
            script.chmod(0o755)
        return tools

    def _python(self, block):
        first, rest = block.body.split("\n", 1)
        path, _, at_the_end = first.removeprefix("# ").partition(", at the end")
        if at_the_end or first.endswith("at the end"):
            with (self.folder / path).open("a") as file:
                file.write(rest)
        else:
            (self.folder / path).write_text(rest)

    def _console(self, block):
        for command, expected in commands(block.body):
            if not command.startswith(LEFT_OUT):
                done = self._run(["/bin/sh", "-c", command])
                printed = done.stdout
                assert done.returncode == 0, f"line {block.line}: {command}\n{printed}"
                if expected:
                    assert as_pattern(expected).fullmatch(printed), f"line {block.line}: {command}\n{printed}"

    def _pycon(self, block):
        text = block.body.replace("…", "...")
        done = self._run([sys.executable, "-c", SHELL], input=text, settings=True)
        assert done.returncode == 0, f"line {block.line}\n{done.stdout}"

    def _step(self, block):
        script = textwrap.dedent(self.steps.pop(block.body))
        done = self._run([sys.executable, "-c", script], settings=True)
        assert done.returncode == 0, f"line {block.line}: {block.body}\n{done.stdout}"

    def _run(self, arguments, *, settings=False, **options):
        environment = self.environment | ({"DJANGO_SETTINGS_MODULE": "mysite.settings"} if settings else {})
        return subprocess.run(
            arguments,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            **options,
        )


def commands(text):
    """(command, what it prints) of a console block."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [tuple(part.split("\n", 1)) for part in parts]


def as_pattern(expected):
    """The lines of the page, where … stands for anything; a shell's last newline does not count."""
    return re.compile(".*".join(map(re.escape, expected.rstrip("\n").split("…"))) + r"\n*", re.DOTALL)
