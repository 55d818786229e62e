"""Checks of what a peer sent, field by field: exact type, range, length.

It is not a schema language: each message reads its own positions in order and says what it expects there. The rule:
whatever came, reading it gives the value of exactly the promised type or raises ``InvalidPayload`` with the verb, the
position (an index, or a dotted path into nested arrays), what was expected and what came. A bool is never an int, a
float never an int, a subclass never its base.

Pure: any thread.
"""

import math
from collections.abc import Collection, Iterator
from typing import Final, NoReturn

from lmlive.errors import InvalidPayload
from lmlive.protocol.codec import MAX_TEXT_BYTES

U32_MAX: Final = 2**32 - 1
I63_MAX: Final = 2**63 - 1
U64_MAX: Final = 2**64 - 1

_SHOWN = 64


class Fields:
    """The values of one array, each read by its position.

    Args:
        verb: Name of the message, for errors.
        values: What came.
        count: How many values the array must have.
        path: Positions that lead to the array from the payload; empty for the payload itself.
    """

    __slots__ = ("_path", "_values", "_verb")

    def __init__(self, verb: str, values: object, count: int, path: tuple[int, ...] = ()) -> None:
        self._verb = verb
        self._path = path
        if type(values) is not list:
            self._refuse(None, f"an array of {count}", values)
        if len(values) != count:
            self._refuse(None, f"an array of {count}", f"an array of {len(values)}", described=True)
        self._values: list[object] = values

    def unsigned(self, position: int, *, least: int = 0, most: int = U64_MAX) -> int:
        """Read an integer in a range."""
        value = self._values[position]
        if type(value) is not int or not least <= value <= most:
            self._refuse(position, f"an integer from {least} to {most}", value)
        return value

    def optional_unsigned(self, position: int, *, least: int = 0) -> int | None:
        """Read an integer or nil."""
        return None if self._values[position] is None else self.unsigned(position, least=least)

    def numbers(self, position: int, *, most_items: int, most: int) -> tuple[int, ...]:
        """Read an array of integers from 0; many at once, because a layout has thousands."""
        values = self._values[position]
        if type(values) is not list or len(values) > most_items:
            self._refuse(position, f"an array of at most {most_items}", values)
        for at, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= most:
                self.each(position, most=most_items).refuse(at, f"an integer from 0 to {most}")
        return tuple(values)

    def seconds(self, position: int) -> float:
        """Read a finite number of seconds that is not negative; an integer is taken for the float it equals."""
        value = self._values[position]
        if type(value) not in (int, float) or not isinstance(value, int | float):
            self._refuse(position, "a number of seconds", value)
        if not math.isfinite(value) or not 0 <= value <= I63_MAX:
            self._refuse(position, "a finite number of seconds from 0", value)
        return float(value)

    def flag(self, position: int) -> bool:
        """Read a bool."""
        value = self._values[position]
        if type(value) is not bool:
            self._refuse(position, "a bool", value)
        return value

    def text(self, position: int, *, most: int = MAX_TEXT_BYTES) -> str:
        """Read a string of at most so many bytes of UTF-8."""
        value = self._values[position]
        if type(value) is not str or not _fits(value, most):
            self._refuse(position, f"a string of at most {most} bytes", value)
        return value

    def optional_text(self, position: int) -> str | None:
        """Read a string or nil."""
        return None if self._values[position] is None else self.text(position)

    def one_of(self, position: int, choices: Collection[str]) -> str:
        """Read one of some words."""
        value = self._values[position]
        if type(value) is not str or value not in choices:
            self._refuse(position, " or ".join(repr(choice) for choice in choices), value)
        return value

    def binary(self, position: int, lengths: Collection[int]) -> bytes:
        """Read a byte string of one of some lengths."""
        value = self._values[position]
        if type(value) is not bytes or len(value) not in lengths:
            self._refuse(position, f"{' or '.join(str(length) for length in lengths)} bytes", value)
        return value

    def packed(self, position: int, width: int) -> bytes:
        """Read a byte string of whole items of one width."""
        value = self._values[position]
        if type(value) is not bytes or len(value) % width:
            self._refuse(position, f"bytes, a multiple of {width}", value)
        return value

    def optional_binary(self, position: int) -> bytes | None:
        """Read a byte string or nil."""
        return None if self._values[position] is None else self.packed(position, 1)

    def array(self, position: int, *, most: int) -> list[object]:
        """Read an array of at most so many values, whatever they are."""
        value = self._values[position]
        if type(value) is not list or len(value) > most:
            self._refuse(position, f"an array of at most {most}", value)
        return value

    def each(self, position: int, *, most: int) -> "Fields":
        """Read an array of at most so many values, to be read by their positions in turn."""
        values = self.array(position, most=most)
        return Fields(self._verb, values, len(values), (*self._path, position))

    def nested(self, position: int, count: int) -> "Fields":
        """Read an array of exactly so many values, to be read by their positions in turn."""
        return Fields(self._verb, self._values[position], count, (*self._path, position))

    def mapping(self, position: int) -> dict[str, object]:
        """Read a map whose keys are strings."""
        value = self._values[position]
        if type(value) is not dict or any(type(key) is not str for key in value):
            self._refuse(position, "a map with strings for keys", value)
        return value

    def kind(self, position: int) -> object:
        """Give the first value of a nested array, by which its forms are told apart."""
        value = self._values[position]
        if type(value) is not list or not value:
            self._refuse(position, "an array that begins with its kind", value)
        return value[0]

    def positions(self) -> Iterator[int]:
        """Give each position in order."""
        return iter(range(len(self._values)))

    def refuse(self, position: int, expected: str) -> NoReturn:
        """Refuse a value that has the right type and yet breaks a rule."""
        self._refuse(position, expected, self._values[position])

    def _refuse(self, position: int | None, expected: str, got: object, *, described: bool = False) -> NoReturn:
        text = got if described and isinstance(got, str) else describe(got)
        path = self._path if position is None else (*self._path, position)
        where: int | str = path[0] if len(path) == 1 else ".".join(str(step) for step in path) or "payload"
        raise InvalidPayload(
            f"{self._verb} expects {expected} at {where}, got {text}: see the wire's tables for its payload",
            verb=self._verb,
            position=where,
            expected=expected,
            got=text,
        )


def describe(value: object) -> str:
    """Say what came in a few characters, however large or deep it is."""
    if value is None:
        return "nil"
    if type(value) in (bool, int, float):
        return f"{type(value).__name__} {value!r}"[:_SHOWN]
    if type(value) is str:
        return f"str {value[:_SHOWN]!r}" if len(value) <= _SHOWN else f"str of {len(value)} characters"
    if isinstance(value, bytes | list | dict | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _fits(value: str, most: int) -> bool:
    if len(value) > most:
        return False
    return value.isascii() or len(value.encode("utf-8", "surrogatepass")) <= most
