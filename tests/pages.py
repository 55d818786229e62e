"""The documentation, executable: code blocks of Markdown pages as scripts, and the tables of settings.

A comment on the line before a block says how it is run:

``<!-- run -->``              the default for python; a console block is run only with it
``<!-- no-run: reason -->``   not run
``<!-- continue -->``         part of the same script as the block before
``<!-- with-server -->``      run beside a server in its default run dir; may follow one of the others

Python may use ``await`` at the top level. In a console block each line that begins with ``$ `` is a command, and the
lines below it are what it must print; ``...`` stands for anything.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmlive.config import ServerConfig, WorkerConfig
from lmlive.config.settings import Setting, settings_of

_FENCE = re.compile(
    r"(?P<marks>(?:^<!-- [^\n]* -->\n)*)^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"<!-- (run|no-run|continue|with-server)(?:: (.+?))? -->")
_TABLE = re.compile(r"(<!-- settings: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass
class Script:
    """Code blocks that run together."""

    page: str
    line: int
    language: str
    code: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        """Tell whether it is run at all."""
        if "no-run" in self.marks:
            return False
        return self.language == "python" or (self.language == "console" and "run" in self.marks)


def scripts(page: Path, root: Path) -> list[Script]:
    """Give the scripts of a page, in order."""
    text = page.read_text()
    found: list[Script] = []
    for match in _FENCE.finditer(text):
        marks = {mark[1]: mark[2] or "" for mark in _MARK.finditer(match["marks"])}
        line = text.count("\n", 0, match.start("code")) + 1
        block = Script(str(page.relative_to(root)), line, match["language"], match["code"], marks)
        if "continue" in marks:
            found[-1].code += "\n" * max(0, line - found[-1].line - found[-1].code.count("\n")) + block.code
        else:
            found.append(block)
    return found


def links(page: Path) -> Iterator[Path]:
    """Give the files that a page links to."""
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            yield page.parent / target


def commands(script: Script) -> Iterator[tuple[str, str]]:
    """Give each command of a console block with what it must print."""
    command, printed = "", ""
    for line in script.code.splitlines(keepends=True):
        if line.startswith("$ "):
            if command:
                yield command, printed
            command, printed = line[2:].strip(), ""
        else:
            printed += line
    yield command, printed


def matches(expected: str, printed: str) -> bool:
    """Tell whether a command printed what the page says."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    return not expected.strip() or re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def with_tables(text: str) -> str:
    """Give a page with its tables of settings made anew."""
    configs = {"server": ServerConfig, "worker": WorkerConfig}
    return _TABLE.sub(lambda match: f"{match[1]}{_table(configs[match[2]])}{match[3]}", text)


def _table(config: type) -> str:
    server = config is ServerConfig
    head = ["field", *(["flag", "variable"] if server else []), "default", "unit", "must be", "what it is"]
    rows = [head, ["---"] * len(head)]
    for setting in settings_of(config).values():
        if setting.kind.in_build:
            names = [_flag(setting), f"`{setting.variable}`"] if server else []
            texts = [_cell(setting.kind.rule), _cell(setting.about)]
            rows.append([f"`{setting.name}`", *names, _default(setting), setting.kind.unit or "-", *texts])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def _flag(setting: Setting[Any, Any]) -> str:
    if setting.kind.switch and setting.default:
        return f"`--no-{setting.flag.removeprefix('--')}`"
    return f"`{setting.flag}`" + (" (again for more)" if setting.kind.many else "")


def _default(setting: Setting[Any, Any]) -> str:
    if setting.default in (None, ()):
        return "-"
    return f"`{setting.default:g}`" if isinstance(setting.default, float) else f"`{setting.default}`"


if __name__ == "__main__":
    configuration = Path(__file__).parents[1] / "docs/configuration.md"
    configuration.write_text(with_tables(configuration.read_text()))
