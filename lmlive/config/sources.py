"""Where settings come from: flags, ``LMLIVE_`` variables, a TOML file.

Each reader gives a ``Found``: values for the constructor, and for each value the words that say where it came from, so
that an error can name the flag or the variable or the file. Readers convert text; of values they judge nothing else.
The form of the command line is judged here and not by argparse: a refusal names the flag, the value and the rule.
"""

import argparse
import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmlive._version import __version__
from lmlive.config.settings import Setting
from lmlive.config.tiers import without_password
from lmlive.errors import ConfigError

# Read elsewhere: known, and no settings of a server.
OTHER_VARIABLES = frozenset(
    {
        "LMLIVE_URL",
        "LMLIVE_CONFIG",
        "LMLIVE_ALLOW_SHORT_TIMEOUTS",
        "LMLIVE_FAKE_CUDA_FAULTS",
        "LMLIVE_CURVE_SERVER_KEY",
    }
)
PREFIX = "LMLIVE_"

Settings = Mapping[str, Setting[Any, Any]]

_CLOSE = 0.75
"""How alike two names are, of 1, where one may be a slip for the other."""


@dataclass(frozen=True)
class Found:
    """What one source says."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    config: str | None = None
    """The file that this source names."""
    config_origin: str = ""

    def under(self, stronger: "Found") -> "Found":
        """Give the values of both, the stronger one's word first."""
        return Found(self.values | stronger.values, self.origins | stronger.origins)

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


def read_flags(settings: Settings, argv: Sequence[str], *, prog: str) -> Found:
    """Read the command line."""
    parser = argparse.ArgumentParser(
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
    given = vars(parser.parse_args(_judged(settings, parser, argv)))
    values: dict[str, Any] = {}
    for name, raw in given.items():
        if name == "config":
            continue
        setting = settings[name]
        with Found(origins={name: setting.flag}).named_origins():
            values[name] = _from_flag(setting, raw)
    return Found(values, {name: settings[name].flag for name in values}, given.get("config"), "--config")


def read_environment(settings: Settings, environ: Mapping[str, str], warn: Callable[[str], object]) -> Found:
    """Read the ``LMLIVE_`` variables; ``warn`` is told of unknown ones, empty ones count as unset."""
    by_variable = {setting.variable: setting for setting in settings.values()}
    found = Found(config=environ.get("LMLIVE_CONFIG") or None, config_origin="LMLIVE_CONFIG")
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        setting = by_variable.get(variable)
        if setting is None:
            # Without what all of them share, which would make any two alike.
            near = _nearest(settings, variable.removeprefix(PREFIX).lower())
            warn(f"unknown variable {variable} is ignored{f', {near.variable} was meant?' if near else ''}")
        elif text:
            found.origins[setting.name] = variable
            with found.named_origins():
                found.values[setting.name] = setting.parsed(text)
    return found


def read_file(settings: Settings, path: str | Path, origin: str = "") -> Found:
    """Read a TOML file; an unknown key is an error, because a file is written on purpose.

    Args:
        settings: Those that it may have.
        path: Where it is.
        origin: What named it, for errors.
    """
    try:
        with Path(path).open("rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError) as error:  # TOML and UTF-8 errors are ValueErrors
        rule = "a readable TOML file"
        fault = error.strerror if isinstance(error, OSError) else error
        message = f"{f'{origin}: ' if origin else ''}config is {str(path)!r} but must be {rule}: {fault}"
        raise ConfigError(message, field="config", value=str(path), rule=rule) from error
    for key, value in values.items():
        if key not in settings:
            near = _nearest(settings, key)
            rule = f"the name of a setting{f' ({near.name}?)' if near else ''}"
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


def _judged(settings: Settings, parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Give a command line that argparse has no fault to find with, or raise ``ConfigError``.

    A value is joined to its flag (``--flag=-1x``), so that a wrong one is judged by its rule and not by its dash.
    """
    actions = {text: action for action in parser._actions for text in action.option_strings}  # noqa: SLF001  # there is no public list
    judged: list[str] = []
    words = iter(argv)
    for word in words:
        flag, joined, value = word.partition("=")
        action = actions.get(flag)
        if action is None:
            raise _no_flag(settings, word)
        if action.nargs == 0:  # it takes no value
            if joined:
                rule = f"given without a value ({' or '.join(action.option_strings)})"
                raise _wrong_flag(flag, action.dest, value, f"is {value!r} but must be {rule}", rule)
        elif not joined:
            following = next(words, None)
            if following is None or following in actions:
                rule = settings[action.dest].kind.rule if action.dest in settings else "a readable TOML file"
                raise _wrong_flag(flag, action.dest, None, f"has no value but must be {rule}", rule)
            word = f"{flag}={following}"  # noqa: PLW2901
        judged.append(word)
        if flag in ("-h", "--help", "--version"):
            break
    return judged


def _wrong_flag(flag: str, name: str, value: object, fault: str, rule: str) -> ConfigError:
    return ConfigError(f"{flag}: {name} {fault}", field=name, value=value, rule=rule)


def _no_flag(settings: Settings, word: str) -> ConfigError:
    """Make the error of a word that is no flag and no flag's value."""
    word = without_password(word)  # it may be the url of a tier that lost its flag
    name = word.partition("=")[0]
    if not name.startswith("-"):
        rule = "the value of a flag before it, --help lists them"
        return ConfigError(f"{word!r} follows no flag but must be {rule}", field="flags", value=word, rule=rule)
    near = _nearest(settings, name.removeprefix("--").replace("-", "_"))
    rule = f"one that --help lists{f' ({near.flag}?)' if near else ''}"
    shown = name if name.isprintable() else repr(name)
    return ConfigError(f"{shown}: unknown flag, it must be {rule}", field="flags", value=word, rule=rule)


def _nearest(settings: Settings, name: str) -> Setting[Any, Any] | None:
    """Give the setting of this build whose name this may be a slip for."""
    names: Iterable[str] = [setting.name for setting in settings.values() if setting.kind.in_build]
    near = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    return settings[near[0]] if near else None


def _from_flag(setting: Setting[Any, Any], raw: object) -> object:
    """Turn what argparse gives into a value; a switch and a repeated flag are values already."""
    return setting.parsed(raw) if isinstance(raw, str) else raw
