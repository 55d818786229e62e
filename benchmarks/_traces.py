"""Made-up traffic for caches of prefixes: each request is the chunks of its prompt, from the first on.

A chunk stands for itself and all before it, so chunks are numbers that never mean two things. Everything is drawn from
a seed. Popularity falls by Zipf's law, as it does in the published traces of serving systems.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

Request = list[bytes]
Trace = Callable[[int, np.random.Generator], Iterator[Request]]

_KEY_BYTES: Final = 32


class _Prefixes:
    """Names prefixes: the same path from the root is the same keys, anything else is another."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], bytes] = {}

    def keys(self, path: list[object]) -> Request:
        found: Request = []
        walked: tuple[object, ...] = ()
        for step in path:
            walked = (*walked[-1:], step)
            key = self._known.setdefault(walked, len(self._known).to_bytes(_KEY_BYTES, "big"))
            found.append(key)
            walked = (key,)
        return found


def _zipf(random: np.random.Generator, count: int, skew: float) -> Callable[[], int]:
    weights = 1.0 / np.arange(1, count + 1) ** skew
    steps = np.cumsum(weights / weights.sum())
    return lambda: int(np.searchsorted(steps, random.random()))


def system_prompts(requests: int, random: np.random.Generator) -> Iterator[Request]:
    """Four hundred system prompts of 4 to 16 chunks, each asked with 1 to 4 chunks that never come again."""
    prefixes, pick = _Prefixes(), _zipf(random, 400, 1.0)
    lengths = random.integers(4, 17, 400)
    for number in range(requests):
        system = pick()
        path: list[object] = [(system, at) for at in range(lengths[system])]
        yield prefixes.keys([*path, *((number, at, "own") for at in range(random.integers(1, 5)))])


def chats(requests: int, random: np.random.Generator) -> Iterator[Request]:
    """Three hundred chats at a time behind ten system prompts; a turn brings all before it and 1 to 3 chunks more."""
    prefixes = _Prefixes()
    live = [[("system", int(random.integers(10)), at) for at in range(6)] for _ in range(300)]
    for number in range(requests):
        chat = int(random.integers(len(live)) * random.random())  # some talk more than others
        live[chat] += [("turn", number, at) for at in range(random.integers(1, 4))]
        yield prefixes.keys([*live[chat]])
        if len(live[chat]) > 40 or random.random() < 0.1:
            live[chat] = [("system", int(random.integers(10)), at) for at in range(6)]


def documents(requests: int, random: np.random.Generator) -> Iterator[Request]:
    """Two thousand documents of 2 to 30 chunks behind one system prompt, asked by popularity, with a question each."""
    prefixes, pick = _Prefixes(), _zipf(random, 2000, 0.9)
    lengths = random.integers(2, 31, 2000)
    for number in range(requests):
        document = pick()
        path: list[object] = [("system", at) for at in range(2)]
        path += [(document, at) for at in range(lengths[document])]
        yield prefixes.keys([*path, ("question", number)])


def documents_with_batch(requests: int, random: np.random.Generator) -> Iterator[Request]:
    """The same, and every third request is of a batch job that reads another document of 30 chunks, once."""
    prefixes = _Prefixes()
    for number, request in enumerate(documents(requests, random)):
        if number % 3 == 0:
            yield prefixes.keys([("batch", number, at) for at in range(30)])
        yield [b"d" + key[1:] for key in request]


TRACES: Final[dict[str, Trace]] = {
    "shared system prompts": system_prompts,
    "multi-turn chats": chats,
    "documents (RAG)": documents,
    "documents and a batch job": documents_with_batch,
}
