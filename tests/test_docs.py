import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlive.server import status
from lmlive.server.status import ServerStatus
from tests.pages import Script, commands, links, matches, scripts, with_tables

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPTS = [script for page in PAGES for script in scripts(page, ROOT)]
RUNNABLE = [script for script in SCRIPTS if script.runs]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60

# Runs a script that may await at its top level, and lets a traceback name the page and its line.
RUNNER = """
import ast, asyncio, inspect, linecache, sys
page, line = sys.argv[1], int(sys.argv[2])
source = "\\n" * (line - 1) + sys.stdin.read()
linecache.cache[page] = (len(source), None, source.splitlines(True), page)
code = compile(source, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
result = eval(code, {"__name__": "__main__"})
if inspect.iscoroutine(result):
    asyncio.run(result)
"""


@pytest.fixture
def environment(run_dir: Path) -> dict[str, str]:
    """Give an environment with a runtime directory of its own and this Python's commands first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Scripts run in a home of their own: beside the server's run dir, named lmlive, Python would import that.
    home = run_dir / "home"
    home.mkdir()
    return {**os.environ, "XDG_RUNTIME_DIR": str(run_dir), "PATH": path, "HOME": str(home)}


@contextlib.contextmanager
def server(environment: dict[str, str]) -> Iterator[None]:
    """Run a server in its default run dir."""
    command = [sys.executable, "-m", "lmlive.server", "--pool-bytes", "64MiB"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline().startswith("lmlive ready ")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()
    assert process.returncode == 0


def run(command: list[str], environment: dict[str, str], text: str = "") -> str:
    done = subprocess.run(
        command, env=environment, input=text, cwd=environment["HOME"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} left with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", RUNNABLE, ids=lambda script: f"{script.page}:{script.line}")
def test_a_block_of_the_documentation_runs(script: Script, environment: dict[str, str]) -> None:
    with server(environment) if "with-server" in script.marks else contextlib.nullcontext():
        if script.language == "python":
            run([sys.executable, "-c", RUNNER, script.page, str(script.line)], environment, script.code)
            return
        for command, expected in commands(script):
            printed = run(["bash", "-euo", "pipefail", "-c", command], environment)
            assert matches(expected, printed), f"{command} printed\n{printed}\nnot\n{expected}"


def test_a_block_that_is_not_run_says_why() -> None:
    assert [f"{one.page}:{one.line}" for one in SCRIPTS if one.marks.get("no-run") == ""] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs_and_is_short(example: Path, environment: dict[str, str]) -> None:
    assert len(example.read_text().splitlines()) <= MOST_LINES
    run([sys.executable, str(example)], environment)


def test_the_tables_of_settings_are_in_sync() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    assert with_tables(text) == text, "run: make docs"
    assert text.count("<!-- settings: ") == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    assert [str(target) for target in links(page) if not target.exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_section(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([\w./]*\.md)?#([^)\s]+)\)", page.read_text()):
        titles = re.findall(r"^#+ (.*)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_each_race_names_tests_that_exist() -> None:
    section = (ROOT / "docs/liveness.md").read_text().partition("## Every race, its rule, its test\n")[2]
    rows = [row for row in section.partition("\n## ")[0].splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"\]\(", row)] == []
    for name, path in re.findall(r"\[([^]]+)\]\(\.\./([^)]+)\)", "".join(rows)):
        test = f"def test_{name.replace(' ', '_')}("
        file = ROOT / path
        assert name == file.stem or re.search(rf"^(?:async )?{re.escape(test)}", file.read_text(), re.MULTILINE), (
            f"{path} has no test named '{name}'"
        )


def test_every_field_of_the_status_is_explained() -> None:
    table = (ROOT / "docs/operations.md").read_text().partition("## The status\n")[2].partition("\n## ")[0]
    explained = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"\w+", row)}
    assert fields_of(ServerStatus) - explained == set()


def fields_of(part: type) -> set[str]:
    """Name the fields of a part of the status, and of the parts in it that have a class of their own."""
    found = set()
    for field in dataclasses.fields(part):
        found.add(field.name)
        for word in re.findall(r"\w+", str(field.type)):
            inner = getattr(status, word, None)
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                found |= fields_of(inner)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")


def test_marks_and_continued_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# P\n```python\na = 1\n```\ntext\n<!-- continue -->\n```python\nassert a\n```\n"
        "<!-- no-run: why -->\n```python\n1 / 0\n```\n```console\n$ false\n```\n"
        "<!-- run -->\n<!-- with-server -->\n```console\n$ echo a b\na ...\n$ true\n```\n"
    )
    found = scripts(page, tmp_path)
    assert [(one.line, one.runs) for one in found] == [(3, True), (12, False), (15, False), (20, True)]
    assert found[0].code.splitlines() == ["a = 1", "", "", "", "", "assert a"]
    assert list(commands(found[3])) == [("echo a b", "a ...\n"), ("true", "")]
    assert "with-server" in found[3].marks
    assert matches("a ...\n", "a b\n")
    assert not matches("a ...\n", "b\n")
