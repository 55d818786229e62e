"""A request ends by its deadline, or says that its end is in doubt and what that concerns: there is nothing between."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import lmlive
from lmlive.errors import RequestTimeout
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from tests.conftest import eventually
from tests.end_to_end.peer import filled, peer, retrieve_of, store_of
from tests.end_to_end.scene import CHUNK, PER_CHUNK, Cache, plain, prompt, scene

TOKENS = prompt(3 * CHUNK)
HERE = list(range(3 * PER_CHUNK))
THERE = list(range(100, 100 + 3 * PER_CHUNK))
GRACE = 0.25


def soon(seconds: float = 0.2) -> float:
    return time.monotonic() + seconds


# STORE


async def test_a_store_whose_turn_comes_too_late_copies_nothing_and_is_never_seen(run_dir: Path) -> None:
    other = prompt(2 * CHUNK, 4)
    cache = plain(seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        gate = stage.host.hold("gather")
        first = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        # one instance's requests run in order: this one waits until the gate opens, which is after its deadline
        late = await a.store(other, HERE[: 2 * PER_CHUNK], deadline=soon())
        assert (late.tokens, late.chunks, late.reason) == (0, 0, "timeout")
        assert stage.pool["reserved_chunks"] == 5
        gate.open()
        assert (await first).reason == "stored"
        await stage.quiet()
        assert stage.host.slices["gather"] == 3
        assert stage.pool["chunks"] == 3
        assert stage.server.status().wire.errors == {"RequestTimeout": 1}
        await eventually(lambda: a.stats()["late_replies"] == 1)


@pytest.mark.parametrize("after", [1, 2])
async def test_a_store_whose_deadline_passes_under_its_copy_is_never_seen(run_dir: Path, after: int) -> None:
    """No slice begins after the deadline, and what was copied, be it all, is not published after it."""
    async with scene(run_dir) as stage, peer(stage) as one:
        with filled(1) as fd:
            await one.register(fd)
            gate = stage.host.hold("gather", after=after)
            deadline = time.monotonic_ns() + 100_000_000
            await one.begin(Verb.STORE, 500, store_of(TOKENS, HERE), deadline_ns=deadline)
            await eventually(lambda: gate.waiting == 1)
            await eventually(lambda: time.monotonic_ns() > deadline)
            gate.open()
            reply, body = await one.raw.receive()
            assert isinstance(parse_error(reply.code, body), RequestTimeout)
            assert stage.host.slices["gather"] == after + 1
            pool = stage.pool
            assert (pool["chunks"], pool["reserved_chunks"], pool["used_bytes"]) == (0, 0, 0)
            assert await one.retrieve(retrieve_of(TOKENS, HERE)) == [0, "miss"]
            assert await one.store(store_of(TOKENS, HERE)) == [3 * CHUNK, 3, "stored"]


async def test_what_is_past_its_deadline_when_it_arrives_is_not_done(run_dir: Path) -> None:
    async with scene(run_dir) as stage, peer(stage) as one:
        with filled(1) as fd:
            await one.register(fd)
            assert isinstance(await one.refused(Verb.STORE, store_of(TOKENS, HERE), deadline_ns=1), RequestTimeout)
            assert stage.pool["used_bytes"] == 0
            await one.store(store_of(TOKENS, HERE))
            load = retrieve_of(TOKENS, HERE)
            assert isinstance(await one.refused(Verb.RETRIEVE, load, deadline_ns=1), RequestTimeout)
            assert isinstance(await one.refused(Verb.CLEAR, [None], deadline_ns=1), RequestTimeout)
            assert stage.host.slices["scatter"] == 0
            assert stage.pool["chunks"] == 3


async def test_deadlines_in_the_past_are_results_and_nothing_is_sent(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        assert (await a.store(TOKENS, HERE, deadline=time.monotonic() - 1)).reason == "timeout"
        loaded = await a.retrieve(TOKENS, HERE, deadline=time.monotonic() - 1)
        assert (loaded.tokens, loaded.failed_blocks, loaded.reason) == (0, HERE, "timeout")
        assert loaded.settled.done()
        assert stage.server.status().lanes["transfer"].threads == 0


# RETRIEVE in doubt


async def stored(stage: Any, cache: Cache) -> None:
    async with cache.worker(stage.url) as a:
        assert (await a.store(TOKENS, HERE)).reason == "stored"


async def test_a_retrieve_without_an_answer_is_in_doubt_until_its_answer_comes(run_dir: Path) -> None:
    """The server is in the middle of a slice when the deadline passes: it still writes that one, and no other."""
    cache, reader = plain(seed=1), plain(200, seed=2)
    async with scene(run_dir) as stage, reader.worker(stage.url) as b:
        await stored(stage, cache)
        gate = stage.host.hold("scatter", after=1)
        deadline = soon()
        doubtful = await b.retrieve(TOKENS, THERE, deadline=deadline)
        assert time.monotonic() >= deadline + GRACE
        assert (doubtful.tokens, doubtful.failed_blocks, doubtful.reason) == (0, THERE, "in_doubt")
        assert not doubtful.settled.done()
        assert b.unsettled_blocks == set(THERE)
        assert reader.content(THERE[PER_CHUNK:]) == plain(200, seed=2).content(THERE[PER_CHUNK:])
        gate.open()
        await doubtful.settled
        assert not b.unsettled_blocks
        second, third = THERE[PER_CHUNK : 2 * PER_CHUNK], THERE[2 * PER_CHUNK :]
        # what was in doubt did happen, after the result and before it was settled
        assert reader.content(second) == cache.content(HERE[PER_CHUNK : 2 * PER_CHUNK])
        assert reader.content(third) == plain(200, seed=2).content(third)
        settled = reader.content(range(200))
        await stage.quiet()
        assert reader.content(range(200)) == settled
        assert stage.host.slices["scatter"] == 2


async def test_the_end_of_the_tether_alone_settles_nothing(run_dir: Path) -> None:
    cache, reader = plain(seed=1), plain(200, seed=2)
    async with scene(run_dir) as stage, reader.worker(stage.url) as b:
        await stored(stage, cache)
        gate = stage.host.hold("scatter")
        doubtful = await b.retrieve(TOKENS, THERE, deadline=soon())
        assert doubtful.reason == "in_doubt"
        parts = stage.server._parts
        assert parts is not None
        lost = b.stats().get("lost_tethers", 0)
        parts.tethers.close()
        await eventually(lambda: b.stats().get("lost_tethers", 0) > lost)
        assert await stage.raw.silent()
        assert not doubtful.settled.done()
        assert b.unsettled_blocks == set(THERE)
        gate.open()
        await doubtful.settled


async def test_after_a_doubt_calls_are_quick_misses_until_the_server_is_quick(run_dir: Path) -> None:
    cache, reader = plain(seed=1), plain(200, seed=2)
    async with scene(run_dir) as stage, reader.worker(stage.url) as b:
        await stored(stage, cache)
        gate = stage.host.hold("scatter")
        doubtful = await b.retrieve(TOKENS, THERE, deadline=soon())
        assert doubtful.reason == "in_doubt"
        assert b.stats()["breaker_opened"] == 1
        # PINGs go another way than copies: the next one closes it again
        await eventually(lambda: b._parts is not None and b._parts.gate.passes())
        assert b.healthy
        gate.open()
        await doubtful.settled
        assert (await b.retrieve(TOKENS, THERE)).reason == "loaded"
    assert reader.content(THERE) == cache.content(HERE)


async def test_strict_raises_and_the_error_carries_the_doubt(run_dir: Path) -> None:
    cache, reader = plain(seed=1), plain(200, seed=2)
    strict = lmlive.WorkerConfig(strict=True)
    async with scene(run_dir) as stage, reader.worker(stage.url, config=strict) as b:
        await stored(stage, cache)
        gate = stage.host.hold("scatter")
        with pytest.raises(RequestTimeout) as caught:
            await b.retrieve(TOKENS, THERE, deadline=soon())
        result = caught.value.result
        assert (result.reason, result.failed_blocks) == ("in_doubt", THERE)
        assert not result.settled.done()
        gate.open()
        await result.settled


# Cancelling


@pytest.mark.parametrize("copy", ["gather", "scatter"])
async def test_cancelling_is_honoured_at_the_terminal_answer(run_dir: Path, copy: str) -> None:
    cache = plain(200, seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        if copy == "scatter":
            await a.store(TOKENS, HERE)
        gate = stage.host.hold(copy)
        call: asyncio.Task[Any] = asyncio.create_task(
            a.store(TOKENS, HERE) if copy == "gather" else a.retrieve(TOKENS, THERE)
        )
        await eventually(lambda: gate.waiting == 1)
        for _ in range(2):
            call.cancel()
            assert await stage.raw.silent()
        assert not call.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not a.unsettled_blocks
        assert stage.pool["chunks"] == 3
        # nobody asked it to end early: what the server did is done
        assert (await a.retrieve(TOKENS, THERE)).reason == "loaded"
    assert cache.content(THERE) == cache.content(HERE)


async def test_cancelling_is_honoured_at_the_latest_after_the_deadlines_grace(run_dir: Path) -> None:
    cache, reader = plain(seed=1), plain(200, seed=2)
    async with scene(run_dir) as stage, reader.worker(stage.url) as b:
        await stored(stage, cache)
        gate = stage.host.hold("scatter")
        deadline = soon()
        call = asyncio.create_task(b.retrieve(TOKENS, THERE, deadline=deadline))
        await eventually(lambda: gate.waiting == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() >= deadline + GRACE
        # nobody got a result, so only this tells which blocks are not to be used yet
        assert b.unsettled_blocks == set(THERE)
        gate.open()
        await eventually(lambda: not b.unsettled_blocks)


async def test_a_call_that_sent_nothing_yet_is_cancelled_at_once(run_dir: Path) -> None:
    """All of the server's places for this worker are taken: the call still waits on this side."""
    cache = plain(200, seed=1)
    async with scene(run_dir, max_in_flight=1) as stage, cache.worker(stage.url) as a:
        await a.store(TOKENS, HERE)
        gate = stage.host.hold("scatter")
        first = asyncio.create_task(a.retrieve(TOKENS, THERE))
        await eventually(lambda: gate.waiting == 1)
        second = asyncio.create_task(a.retrieve(TOKENS, [*THERE[:-1], 190]))
        assert await stage.raw.silent()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert a.unsettled_blocks == set(THERE)
        gate.open()
        assert (await first).reason == "loaded"


# close


async def test_close_waits_for_calls_by_the_rule_of_cancelling_and_unregister_settles(run_dir: Path) -> None:
    """close() waits for the call that is in doubt by then, then for the release, which ends the doubt."""
    cache, reader = plain(seed=1), plain(200, seed=2)
    async with scene(run_dir) as stage, reader.worker(stage.url) as b:
        await stored(stage, cache)
        gate = stage.host.hold("scatter")
        call = asyncio.create_task(b.retrieve(TOKENS, THERE, deadline=soon()))
        await eventually(lambda: gate.waiting == 1)
        closing = asyncio.create_task(b.close())
        doubtful = await call
        assert doubtful.reason == "in_doubt"
        await eventually(lambda: (stage.states() or [(0, "", 0)])[0][1] == "condemned")
        assert not closing.done()
        assert not doubtful.settled.done()
        gate.open()
        await closing
        assert doubtful.settled.done()
        assert not b.unsettled_blocks
        assert stage.host.mapped == 0


async def test_close_that_is_cancelled_is_complete_all_the_same(run_dir: Path) -> None:
    cache = plain(200, seed=1)
    async with scene(run_dir) as stage, cache.worker(stage.url) as a:
        gate = stage.host.hold("gather")
        store = asyncio.create_task(a.store(TOKENS, HERE))
        await eventually(lambda: gate.waiting == 1)
        closing = asyncio.create_task(a.close())
        await asyncio.sleep(0)
        closing.cancel()
        assert await stage.raw.silent()
        assert not closing.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert (await store).reason == "stored"
        assert stage.host.mapped == 0
