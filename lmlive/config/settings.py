"""One setting: its default, its rule, and how text becomes its value.

A ``Setting`` is a descriptor that a config dataclass uses as a field. It checks on assignment, which the frozen
dataclass does once, in its constructor. ``Setting[Given, Kept]`` says what the constructor takes and what the attribute
gives: ``pool_bytes`` takes ``"2GiB"`` and gives an int.

Not here: rules between two settings; those belong to the dataclass.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from lmlive.errors import ConfigError

Given = TypeVar("Given")
Kept = TypeVar("Kept")

NOT_IN_BUILD = "not in this build"
LONGEST_SECONDS = 100_000_000.0
LARGEST_SIZE = 2**63 - 1
LARGEST_UID = 2**32 - 2

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
SWITCH_RULE = "1/0, true/false, yes/no or on/off"
_SHOWN = 200


@dataclass(frozen=True)
class Kind:
    """What values a setting may have.

    Args:
        rule: Reads after "must be".
        unit: Unit of the value, or empty.
        shown: Stands for the value in ``--help``; the unit by default.
        check: Gives the value to keep; ``ValueError`` refuses, its text (if any) says more than the rule does.
        parse: Turns text from a flag or a variable into what ``check`` takes.
        many: The flag may be repeated; in a variable the values are separated by commas.
        switch: The flag takes no value.
        in_build: False for a setting whose name is kept for a later build.
        show: Gives a value as it may be shown.
    """

    rule: str
    check: Callable[[Any], object]
    unit: str = ""
    parse: Callable[[str], object] = str
    many: bool = False
    switch: bool = False
    shown: str = ""
    in_build: bool = True
    show: Callable[[object], object] = lambda value: value


class Setting(Generic[Given, Kept]):
    """A checked field of a config dataclass.

    Args:
        default: What it is when nobody says; checked like any other value.
        kind: Its rule.
        about: One sentence for ``--help`` and the documentation.
    """

    def __init__(self, default: Given, kind: Kind, about: str) -> None:
        self.default = default
        self.kind = kind
        self.about = about
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: object, owner: type | None = None) -> Kept:
        """Give the kept value; on the class, the default (where the dataclass looks for it)."""
        return cast("Kept", self.default if config is None else vars(config)[self.name])

    def __set__(self, config: object, value: Given) -> None:
        """Check and keep a value; the dataclass lets only its constructor come here."""
        vars(config)[self.name] = self.checked(value)

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return "LMLIVE_" + self.name.upper()

    def checked(self, value: object) -> Kept:
        """Give the value to keep, or raise ``ConfigError``."""
        try:
            return cast("Kept", self.kind.check(value))
        except ValueError as error:
            raise refusal(self, value, str(error) or self.kind.rule) from None

    def parsed(self, text: str) -> object:
        """Turn text into a value for the constructor, or raise ``ConfigError``."""
        try:
            return self.kind.parse(text)
        except ValueError:
            raise refusal(self, text, self.kind.rule) from None


def settings_of(config: type) -> dict[str, Setting[Any, Any]]:
    """Give the settings of a config class by name, in order of declaration."""
    return {field.name: value for field in fields(config) if isinstance(value := vars(config).get(field.name), Setting)}


def refusal(setting: Setting[Any, Any], value: object, rule: str) -> ConfigError:
    """Make the error of a value that breaks a rule."""
    value = str(value) if isinstance(value, Path) else setting.kind.show(value)
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    return ConfigError(f"{setting.name} is {shown} but must be {rule}", field=setting.name, value=value, rule=rule)


def seconds(*, least: float = 0.0, above: float | None = None) -> Kind:
    """Make the kind of a duration: a finite float, from ``least`` or above ``above``."""
    bound = f"above {above:g}" if above is not None else f"at least {least:g}"

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        kept = float(value) if abs(value) <= LONGEST_SECONDS else math.nan
        if not kept >= least or (above is not None and kept <= above):  # nan fails here
            raise ValueError
        return kept

    return Kind(f"a finite number of seconds, {bound}, at most {LONGEST_SECONDS:,.0f}", check, "s", float)


def count(least: int, most: int, unit: str = "") -> Kind:
    """Make the kind of a whole number in a range."""

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError
        return value

    return Kind(f"a whole number from {least:,} to {most:,}", check, unit, int)


def size(least: str, most: str | None = None) -> Kind:
    """Make the kind of a number of bytes, also given as text like ``"1.5GiB"``."""
    smallest = bytes_of(least)
    largest = LARGEST_SIZE if most is None else bytes_of(most)
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        kept = value if isinstance(value, int) else bytes_of(value)
        if not smallest <= kept <= largest:
            raise ValueError
        return kept

    return Kind(f"a size like 1073741824, 512MiB, 2GiB or 1.5GB, {bounds}", check, "bytes")


def bytes_of(text: str) -> int:
    """Read a size; fractions of a byte are cut off.

    Raises:
        ValueError: It is not one.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (factor := _UNITS.get(match[2].lower())) is None:
        raise ValueError
    return int(Fraction(match[1]) * factor)


def choice(*options: str, later: tuple[str, ...] = (), fold: Callable[[str], str] = str) -> Kind:
    """Make the kind of one word out of several; ``later`` are words of builds to come."""
    rule = " or ".join(options) if len(options) < 3 else f"one of {', '.join(options)}"

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        kept = fold(value)
        if kept in later:
            raise ValueError(f"{rule}; {kept} is {NOT_IN_BUILD}")
        if kept not in options:
            raise ValueError
        return kept

    return Kind(rule, check, shown="|".join(options))


def switch(*, variable: bool = False) -> Kind:
    """Make the kind of a truth value; ``variable`` says that there is one, where it is a text."""

    def check(value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value

    rule = f"true or false (in a variable: {SWITCH_RULE})" if variable else "true or false"
    return Kind(rule, check, parse=parse_switch, switch=True)


def texts(
    rule: str,
    check_each: Callable[[str], str],
    shown: str,
    *,
    most: int | None = None,
    show_each: Callable[[str], str] | None = None,
) -> Kind:
    """Make the kind of a list of texts; one text alone is a list of one.

    Args:
        rule: Reads after "must be".
        check_each: Gives a text as it is kept; ``ValueError`` refuses it.
        shown: Stands for the value in ``--help``.
        most: How many there may be; None: any number.
        show_each: Gives a text as it may be shown; as it is without.
    """

    def check(value: object) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
        kept = tuple(check_each(item) for item in items if isinstance(item, str))
        if len(kept) != len(items) or len(set(kept)) != len(kept) or (most is not None and len(kept) > most):
            raise ValueError
        return kept

    def show(value: object) -> object:
        if show_each is None:
            return value
        if isinstance(value, str):
            return show_each(value)
        if isinstance(value, list | tuple):
            return type(value)(show(item) for item in value)
        return value

    return Kind(rule, check, parse=_parse_list, many=True, shown=shown, show=show)


def uids() -> Kind:
    """Make the kind of a list of user ids; one number alone is a list of one."""

    def check(value: object) -> tuple[int, ...]:
        items = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        kept = tuple(_uid(item) for item in items)
        if len(set(kept)) != len(kept):
            raise ValueError
        return kept

    rule = f"user ids from 0 to {LARGEST_UID:,}, each once"
    return Kind(rule, check, parse=_parse_list, many=True, shown="UID")


def _uid(value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_UID:
        raise ValueError
    return value


def file() -> Kind:
    """Make the kind of an optional file."""
    return _path("a path of a file", "FILE")


def directory() -> Kind:
    """Make the kind of an optional directory."""
    return _path("a path of a directory", "DIR")


def _path(rule: str, shown: str) -> Kind:

    def check(value: object) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise ValueError
        return Path(value).absolute()

    return Kind(rule, check, shown=shown)


def later(*, many: bool = False, switch: bool = False) -> Kind:
    """Make the kind of a setting whose name is kept for a later build: it can only be left alone."""

    def check(value: object) -> object:
        if value:
            raise ValueError
        return value

    parse = parse_switch if switch else _parse_list if many else str
    return Kind(f"left out: it is {NOT_IN_BUILD}", check, parse=parse, many=many, switch=switch, in_build=False)


def parse_switch(text: str) -> bool:
    """Read a truth value.

    Raises:
        ValueError: It is none of ``SWITCH_RULE``.
    """
    if (value := _SWITCH.get(text.strip().lower())) is None:
        raise ValueError
    return value


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))
