"""A worker without the library: a raw connection and a tether, which does exactly what a test says, right or wrong."""

import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import numpy as np

from lmlive.cache.keys import chunk_keys
from lmlive.errors import LMLiveError
from lmlive.protocol.codec import Header, encode_request
from lmlive.protocol.verbs import Verb
from tests.end_to_end.scene import BLOCK, CHUNK
from tests.server.raw import BLOCK_BYTES, Raw, Tie, memory_file

BLOCKS = 16
"""Blocks of a peer's memory, each of ``BLOCK_BYTES``, in one plane."""


class Place(Protocol):
    """A server, wherever it runs."""

    @property
    def url(self) -> str: ...

    @property
    def epoch(self) -> int: ...


class Peer:
    """One instance over one connection; ``memory`` is its cache, ``[blocks, bytes]``.

    Attributes:
        generation: As the server told it; a test may lie about it.
    """

    def __init__(self, raw: Raw, tie: Tie, epoch: int, secret: bytes, instance_id: int) -> None:
        self.raw = raw
        self.tie = tie
        self.epoch = epoch
        self.secret = secret
        self.instance_id = instance_id
        self.generation = 0

    async def register(self, fd: int, **changes: Any) -> tuple[Header, list[Any]]:
        """Send a descriptor and register it; ``changes`` of the payload's parts by name."""
        await self.tie.offer(fd, instance_id=self.instance_id, secret=self.secret)
        header, body = await self.raw.ask(Verb.REGISTER, register(self.secret, **changes), instance_id=self.instance_id)
        if not header.code:
            self.generation = header.generation
        return header, body

    def header(self, **changes: int) -> dict[str, int]:
        known = {"epoch": self.epoch, "instance_id": self.instance_id, "generation": self.generation}
        return known | changes

    async def store(self, payload: list[object], **changes: int) -> list[Any]:
        return await self.raw.result(Verb.STORE, payload, **self.header(**changes))

    async def retrieve(self, payload: list[object], **changes: int) -> list[Any]:
        return await self.raw.result(Verb.RETRIEVE, payload, **self.header(**changes))

    async def refused(self, verb: Verb, payload: list[object], **changes: int) -> LMLiveError:
        return await self.raw.error(verb, payload, **self.header(**changes))

    async def begin(self, verb: Verb, number: int, payload: list[object], **changes: int) -> None:
        """Send a request and do not wait for its answer."""
        await self.raw.send(encode_request(verb, number, payload, **self.header(**changes)))


def register(secret: bytes, *, blocks: int = BLOCKS, **changes: Any) -> list[object]:
    """Give the payload of a REGISTER of one plane in descriptor 0, with changes by name."""
    known: dict[str, Any] = {
        "model": "m",
        "mode": "server_driven",
        "planes": [[0, 0, BLOCK_BYTES, BLOCK_BYTES, [BLOCK], [0]]],
        "handles": [["fd", 0, blocks * BLOCK_BYTES]],
    } | changes
    groups: list[object] = [[BLOCK, blocks, known["planes"]]]
    return [secret, known["model"], "", 0, 1, "float32", "", known["mode"], "auto", groups, known["handles"]]


def keys_of(tokens: Sequence[int]) -> bytes:
    return b"".join(chunk_keys(tokens, chunk_tokens=CHUNK))


def packed(blocks: Sequence[int]) -> bytes:
    return np.asarray(blocks, "<u4").tobytes()


def store_of(tokens: Sequence[int], blocks: Sequence[int], skip: int = 0) -> list[object]:
    return [keys_of(tokens), [packed(blocks)], skip, bytes(16)]


def retrieve_of(tokens: Sequence[int], blocks: Sequence[int], skip: int = 0, lease: str | None = None) -> list[object]:
    return [keys_of(tokens), [packed(blocks)], skip, lease]


@contextmanager
def filled(seed: int, name: str = "lmlive-test") -> Iterator[int]:
    """Give a file of ``filled_file``, and close it at the end."""
    fd = filled_file(name, seed)
    try:
        yield fd
    finally:
        os.close(fd)


def filled_file(name: str, seed: int, blocks: int = BLOCKS) -> int:
    """Make a sealed memory file of known bytes."""
    fd = memory_file(name, blocks * BLOCK_BYTES)
    os.pwrite(fd, np.random.default_rng(seed).bytes(blocks * BLOCK_BYTES), 0)
    return fd


@asynccontextmanager
async def peer(server: Place, *, secret: bytes | None = None, instance_id: int = 7) -> AsyncIterator[Peer]:
    """Connect a peer that said HELLO and has a tether, and registered nothing."""
    secret = secret or secrets.token_bytes(16)
    async with Raw(server.url) as raw:
        path = (await raw.hello(secret))[5]
        async with Tie(path) as tie:
            yield Peer(raw, tie, server.epoch, secret, instance_id)
