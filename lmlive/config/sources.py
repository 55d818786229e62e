"""Where settings come from: flags, ``LMLIVE_`` variables, a TOML file.

Each reader gives a ``Found``: values for the constructor, and for each value the words that say where it came from, so
that an error can name the flag or the variable or the file. Readers convert text; they judge nothing else.
"""

import argparse
import difflib
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lmlive._version import __version__
from lmlive.config.settings import Setting
from lmlive.errors import ConfigError

# Read elsewhere, or by tests: known, and no settings of a server.
OTHER_VARIABLES = frozenset({"LMLIVE_URL", "LMLIVE_CONFIG", "LMLIVE_ALLOW_SHORT_TIMEOUTS", "LMLIVE_FAKE_CUDA_FAULTS"})
TEST_PREFIX = "LMLIVE_TEST_"

Settings = Mapping[str, Setting[Any, Any]]

_log = logging.getLogger("lmlive.config")


@dataclass(frozen=True)
class Found:
    """What one source says."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    config: str = ""

    def under(self, stronger: "Found") -> "Found":
        """Give both, the stronger one's word first."""
        return Found(self.values | stronger.values, self.origins | stronger.origins, stronger.config or self.config)

    @contextmanager
    def named_origins(self) -> Iterator[None]:
        """Say in a ConfigError where its value came from."""
        try:
            yield
        except ConfigError as error:
            origin = self.origins.get(str(error.fields.get("field")))
            if origin is None:
                raise
            raise ConfigError(f"{origin}: {error.message}", **error.fields) from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what every other wrong setting raises; the caller turns it into exit status 2."""
        raise ConfigError(f"{message}; --help lists the flags", field="flags", value=message, rule="a known flag")


def read_flags(settings: Settings, argv: Sequence[str], *, prog: str) -> Found:
    """Read the command line."""
    parser = _Parser(
        prog=prog,
        description="Run an lmlive server: a KV cache for LLM workers that knows which of them are alive.",
        epilog="Each setting is also a variable LMLIVE_<NAME> and a key of the file; flags win, then variables.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"lmlive {__version__}")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for setting in settings.values():
        _add_flag(parser, setting)
    given = vars(parser.parse_args(_joined(parser, argv)))
    values: dict[str, Any] = {}
    for name, raw in given.items():
        if name == "config":
            continue
        setting = settings[name]
        with Found(origins={name: setting.flag}).named_origins():
            values[name] = _from_flag(setting, raw)
    return Found(values, {name: settings[name].flag for name in values}, given.get("config", ""))


def read_environment(settings: Settings, environ: Mapping[str, str]) -> Found:
    """Read the ``LMLIVE_`` variables; unknown ones get a warning, empty ones count as unset."""
    by_variable = {setting.variable: setting for setting in settings.values()}
    found = Found(config=environ.get("LMLIVE_CONFIG", ""))
    for variable, text in environ.items():
        if not variable.startswith("LMLIVE_") or variable.startswith(TEST_PREFIX) or variable in OTHER_VARIABLES:
            continue
        setting = by_variable.get(variable)
        if setting is None:
            near = difflib.get_close_matches(variable, by_variable, n=1)
            _log.warning("unknown variable %s is ignored%s", variable, f", {near[0]} was meant?" if near else "")
        elif text:
            found.origins[setting.name] = variable
            with found.named_origins():
                found.values[setting.name] = setting.parsed(text)
    return found


def read_file(settings: Settings, path: str | Path) -> Found:
    """Read a TOML file; an unknown key is an error, because a file is written on purpose."""
    try:
        with Path(path).open("rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError) as error:  # TOML and UTF-8 errors are ValueErrors
        rule = "a readable TOML file"
        raise ConfigError(
            f"--config: {path} must be {rule}: {error}", field="config", value=str(path), rule=rule
        ) from error
    for key, value in values.items():
        if key not in settings:
            near = difflib.get_close_matches(key, settings, n=1)
            rule = f"the name of a setting{f' ({near[0]}?)' if near else ''}"
            raise ConfigError(f"{path}: {key} must be {rule}", field=key, value=value, rule=rule)
    return Found(values, {key: f"{path}: {key}" for key in values})


def _add_flag(parser: argparse.ArgumentParser, setting: Setting[Any, Any]) -> None:
    text = setting.about.replace("%", "%%")
    if setting.default not in ((), None, True, False):
        text += f" ({setting.default})"
    shown = text if setting.kind.in_build else argparse.SUPPRESS
    value = setting.kind.shown or setting.kind.unit.upper() or "VALUE"
    if setting.kind.switch and setting.default:
        parser.add_argument(setting.flag, action=argparse.BooleanOptionalAction, help=shown)
    elif setting.kind.switch:
        parser.add_argument(setting.flag, action="store_true", help=shown)
    elif setting.kind.many:
        parser.add_argument(setting.flag, action="append", metavar=value, help=shown)
    else:
        parser.add_argument(setting.flag, metavar=value, help=shown)


def _joined(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Write ``--flag -1x`` as ``--flag=-1x``, so that a wrong value is judged by its rule, not by its dash."""
    flags = {text: action.nargs != 0 for action in parser._actions for text in action.option_strings}  # noqa: SLF001  # there is no public list
    joined: list[str] = []
    words = iter(argv)
    for word in words:
        following = next(words, None) if flags.get(word) else None
        if following is None:
            joined.append(word)
        elif following in flags:
            joined += [word, following]
        else:
            joined.append(f"{word}={following}")
    return joined


def _from_flag(setting: Setting[Any, Any], raw: object) -> object:
    """Turn what argparse gives into a value; a switch and a repeated flag are values already."""
    return setting.parsed(raw) if isinstance(raw, str) else raw
