"""Requests that do not fit, of a peer that registered or tries to: each gets its typed error, and nobody is harmed."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmlive.errors import (
    InvalidBlocks,
    InvalidHandle,
    InvalidLayout,
    InvalidPayload,
    LMLiveError,
    MessageTooLarge,
    NotOwner,
    StaleEpoch,
    StaleGeneration,
    UnknownInstance,
)
from lmlive.protocol.codec import encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from tests.end_to_end.peer import BLOCKS, Peer, filled, keys_of, packed, peer, register, retrieve_of, store_of
from tests.end_to_end.scene import BLOCK, CHUNK, PER_CHUNK, prompt
from tests.end_to_end.witness import registered, witnessed
from tests.server.raw import BLOCK_BYTES, Raw, memory_file

# Blocks that do not fit

MINE = prompt(2 * CHUNK, 3)
KEYS = keys_of(MINE)
GOOD = list(range(2 * PER_CHUNK))
BAD_BLOCKS: dict[str, list[bytes]] = {
    "just outside": [packed([*GOOD[:-1], BLOCKS])],
    "far outside": [packed([*GOOD[:-1], 2**32 - 1])],
    "too few": [packed(GOOD[:-1])],
    "none": [b""],
    "too many": [packed([*GOOD, *range(8, 13)])],
    "outside in the tail": [packed([*GOOD, BLOCKS])],
    "a group too many": [packed(GOOD), packed(GOOD)],
    "no group": [],
}


@pytest.mark.parametrize("verb", [Verb.STORE, Verb.RETRIEVE])
async def test_blocks_that_do_not_fit_the_layout(run_dir: Path, verb: Verb) -> None:
    last = bytes(16) if verb is Verb.STORE else None
    async with witnessed(run_dir) as (stage, witness), registered(stage) as one:
        for name, blocks in BAD_BLOCKS.items():
            assert isinstance(await one.refused(verb, [KEYS, list(blocks), 0, last]), InvalidBlocks), name
        assert isinstance(await one.refused(verb, [KEYS, [packed(GOOD)], BLOCK // 2, last]), InvalidBlocks)
        for payload in (
            [KEYS[:-1], [packed(GOOD)], 0, last],
            [KEYS, [packed(GOOD)[:-1]], 0, last],
            [KEYS, packed(GOOD), 0, last],
            [KEYS, [packed(GOOD)], -1, last],
            [KEYS, [packed(GOOD)], True, last],
            [KEYS, [GOOD], 0, last],
            [KEYS, [packed(GOOD)], 0, last, None],
            [],
        ):
            assert isinstance(await one.refused(verb, payload), InvalidPayload)
        if verb is Verb.RETRIEVE:
            twice = [KEYS, [packed([*GOOD[:-1], 0])], 0, None]
            assert isinstance(await one.refused(verb, twice), InvalidBlocks)
        assert stage.host.slices["gather"] == 2
        assert not stage.host.slices["scatter"]
        # and it may still do what is right
        assert await one.store(store_of(MINE, GOOD)) == [2 * CHUNK, 2, "stored"]
        assert await one.retrieve(retrieve_of(MINE, GOOD)) == [2 * CHUNK, "loaded"]
        await witness.check(mapped=2, chunks=4)


async def test_a_prompt_and_a_message_over_the_limits(run_dir: Path) -> None:
    limits = {"max_tokens": 4 * CHUNK, "max_blocks": 20, "max_message_bytes": "8KiB"}
    async with witnessed(run_dir, **limits) as (stage, witness), registered(stage) as one:
        long = prompt(5 * CHUNK)
        for verb, last in ((Verb.STORE, bytes(16)), (Verb.RETRIEVE, None)):
            too_long = await one.refused(verb, [keys_of(long), [packed([0] * 20)], 0, last])
            assert (type(too_long), too_long.size, too_long.limit) == (MessageTooLarge, 5 * CHUNK, 4 * CHUNK)
            too_many = await one.refused(verb, [keys_of(long[: 4 * CHUNK]), [packed([0] * 21)], 0, last])
            assert (type(too_many), too_many.size, too_many.limit) == (MessageTooLarge, 21, 20)
            large = await one.refused(verb, [bytes(32 * 300), [packed(GOOD)], 0, last])
            assert (type(large), large.limit) == (MessageTooLarge, 8192)
        asked = await one.refused(Verb.LOOKUP, ["m", "", 1, keys_of(long), None])
        assert (type(asked), asked.limit) == (MessageTooLarge, 4 * CHUNK)
        # beyond twice the limit libzmq ends the connection; nobody else's
        async with Raw(stage.url) as large_one:
            await large_one.send(encode_request(Verb.STORE, 1, [bytes(32 * 600), [], 0, bytes(16)]))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await large_one.receive()
        await witness.check(mapped=2)


# Handles that do not hold what they say


@asynccontextmanager
async def memory(nbytes: int, name: str = "lmlive-test") -> AsyncIterator[int]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, nbytes)
    try:
        yield fd
    finally:
        os.close(fd)


async def refuse(one: Peer, fd: int, **changes: Any) -> LMLiveError:
    header, body = await one.register(fd, **changes)
    assert header.code, body
    assert header.generation == 0
    return parse_error(header.code, body)


def plane(*, handle: int = 0, offset: int = 0, stride: int = BLOCK_BYTES, run: int = BLOCK_BYTES) -> list[object]:
    return [handle, offset, stride, run, [BLOCK], [0]]


async def test_handles_that_are_smaller_than_their_layout(run_dir: Path) -> None:
    whole = BLOCKS * BLOCK_BYTES
    async with witnessed(run_dir) as (stage, witness), peer(stage) as one, memory(whole - 4096) as fd:
        # the file is smaller than the handle says
        short = await refuse(one, fd)
        assert (type(short), short.size, short.needed) == (InvalidHandle, whole - 4096, whole)
        sealed = memory_file("lmlive-test", whole - 4096)
        assert isinstance(await refuse(one, sealed), InvalidHandle)
        os.close(sealed)
        # the handle says less than its layout needs
        assert isinstance(await refuse(one, fd, handles=[["fd", 0, whole - 4096]]), InvalidHandle)
        # one plane begins too late
        late = await refuse(one, fd, planes=[plane(offset=8)], handles=[["fd", 0, whole - 4096]], blocks=BLOCKS - 1)
        assert isinstance(late, InvalidHandle)
        assert isinstance(await refuse(one, fd, handles=[["fd", 1, whole]]), InvalidHandle)
        assert isinstance(await refuse(one, fd, handles=[["fd", 0, whole], ["fd", 0, whole]]), InvalidHandle)
        cuda = await refuse(one, fd, handles=[["cuda", bytes(64), "GPU-1", whole]])
        assert isinstance(cuda, InvalidHandle)
        for planes in (
            [plane(run=12)],
            [plane(run=0)],
            [plane(stride=8)],
            [plane(offset=4)],
            [[0, 0, BLOCK_BYTES, BLOCK_BYTES, [7], [0]]],
            [],
        ):
            assert isinstance(await refuse(one, fd, planes=planes), InvalidLayout), planes
        assert isinstance(await refuse(one, fd, planes=[plane(handle=1)]), InvalidPayload)
        assert isinstance(await refuse(one, fd, blocks=2**32 - 1), InvalidHandle)
        assert isinstance(await refuse(one, fd, mode="engine_driven"), InvalidLayout)
        await witness.check()
        assert stage.states() == [(1, "active", 0)]


async def test_descriptors_that_are_no_memory(run_dir: Path) -> None:
    left, right = socket.socketpair()
    reader, writer = os.pipe()
    opened = [reader, writer, *(os.open(path, os.O_RDONLY) for path in ("/tmp", "/dev/zero", "/proc/self/maps"))]
    with left, right:
        async with witnessed(run_dir) as (stage, witness):
            for fd in (left.fileno(), *opened):
                async with peer(stage) as one:
                    assert isinstance(await one.tie.offer(fd, secret=one.secret), InvalidHandle)
                    header, body = await one.raw.ask(Verb.REGISTER, register(one.secret), instance_id=7)
                    assert isinstance(parse_error(header.code, body), InvalidHandle)
            await witness.check()
    for fd in opened:
        os.close(fd)


async def test_a_descriptor_that_can_only_be_read_is_refused(run_dir: Path) -> None:
    async with witnessed(run_dir) as (stage, witness), peer(stage) as one, memory(BLOCKS * BLOCK_BYTES) as fd:
        reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            assert isinstance(await refuse(one, reading), InvalidHandle)
        finally:
            os.close(reading)
        await witness.check()


# Somebody else's


async def test_ids_generations_and_epochs_that_are_not_ones_own(run_dir: Path) -> None:
    async with (
        witnessed(run_dir) as (stage, witness),
        registered(stage) as one,
        peer(stage, instance_id=8) as thief,
        Raw(stage.url) as stranger,
    ):
        store, load = store_of(MINE, GOOD), retrieve_of(MINE, GOOD)
        for verb, payload in ((Verb.STORE, store), (Verb.RETRIEVE, load)):

            async def asked(who: Peer, *, verb: Verb = verb, payload: Any = payload, **header: int) -> LMLiveError:
                return await who.refused(verb, payload, **header)

            assert isinstance(await asked(thief, instance_id=7, generation=one.generation), NotOwner)
            assert isinstance(await asked(thief), UnknownInstance)
            assert isinstance(await asked(one, generation=99), StaleGeneration)
            assert isinstance(await asked(one, generation=0), StaleGeneration)
            assert isinstance(await asked(one, epoch=1), StaleEpoch)
            assert isinstance(await asked(one, epoch=0), StaleEpoch)
            assert isinstance(await asked(one, instance_id=2**64 - 1), UnknownInstance)
            assert isinstance(await asked(one, instance_id=0), UnknownInstance)
            silent = await stranger.error(verb, payload, **one.header())
            assert (type(silent), silent.hello) == (StaleEpoch, True)
        with filled(2) as fd:
            await thief.tie.offer(fd, instance_id=7, secret=thief.secret)
        taken = await thief.raw.error(Verb.REGISTER, register(thief.secret), instance_id=7)
        assert isinstance(taken, NotOwner)
        assert isinstance(await thief.raw.error(Verb.UNREGISTER, [thief.secret], instance_id=7), NotOwner)
        assert await thief.raw.result(Verb.REAP, [7, 99]) == [False]
        # it was never touched: its own requests go on
        assert await one.store(store) == [2 * CHUNK, 2, "stored"]
        await stage.raw.result(Verb.REAP, [7, None])
        assert isinstance(await one.refused(Verb.STORE, store), UnknownInstance)
        assert isinstance(await one.refused(Verb.RETRIEVE, load), UnknownInstance)
        await witness.check(chunks=4)
