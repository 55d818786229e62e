"""What HELLO says that a server takes: workers keep to it, and from those that do not the server takes no more."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import lmlive
from lmlive.errors import MessageTooLarge, ServerBusy
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from lmlive.server import lanes
from tests.conftest import eventually
from tests.end_to_end.peer import keys_of, packed, store_of
from tests.end_to_end.scene import CHUNK, PER_CHUNK, Scene, plain, prompt, scene
from tests.end_to_end.witness import registered

PATIENT = lmlive.WorkerConfig(request_timeout=10.0, strict=True)


async def limits_of(stage: Scene) -> dict[str, int]:
    limits = (await stage.raw.hello())[4]
    assert isinstance(limits, dict)
    return limits


async def test_a_worker_sends_nothing_that_is_over_a_limit(run_dir: Path) -> None:
    told: dict[str, Any] = {"max_tokens": 2 * CHUNK, "max_blocks": 6, "max_message_bytes": "4KiB"}
    cache = plain(seed=1)
    async with scene(run_dir, **told) as stage:
        assert await limits_of(stage) == {"message_bytes": 4096, "tokens": 128, "blocks": 6, "in_flight": 64}
        async with (
            cache.worker(stage.url, config=PATIENT) as worker,
            lmlive.Scheduler(stage.url, model="m", config=PATIENT) as scheduler,
        ):
            long, blocks = prompt(3 * CHUNK), list(range(3 * PER_CHUNK))
            for call in (worker.store(long, blocks), worker.retrieve(long, blocks), scheduler.lookup(long)):
                with pytest.raises(MessageTooLarge) as caught:
                    await call
                assert (caught.value.size, caught.value.limit) == (3 * CHUNK, 2 * CHUNK)
            wide = worker.store(long[: 2 * CHUNK], list(range(2 * PER_CHUNK)))
            with pytest.raises(MessageTooLarge) as caught:
                await wide
            assert (caught.value.size, caught.value.limit) == (2 * PER_CHUNK, 6)
            with pytest.raises(MessageTooLarge) as caught:
                await worker.retrieve(long[:CHUNK], list(range(PER_CHUNK)), lease="x" * 4090)
            assert caught.value.limit == 4096
            assert (await worker.store(long[:CHUNK], list(range(PER_CHUNK)))).reason == "stored"
        assert stage.server.status().wire.errors == {}


async def test_a_server_takes_no_more_of_those_that_do_not_care(run_dir: Path) -> None:
    async with scene(run_dir, max_in_flight=2) as stage, registered(stage) as one, registered(stage) as other:
        assert (await limits_of(stage))["in_flight"] == 2
        held = stage.host.hold("gather")
        for number in range(100, 106):
            await one.begin(Verb.STORE, number, store_of(prompt(CHUNK, number), range(PER_CHUNK)))
        refused = []
        for _ in range(4):
            reply, body = await one.raw.receive()
            error = parse_error(reply.code, body)
            assert isinstance(error, ServerBusy)
            assert (error.limit, error.retry_after) == (2, 0.1)
            refused.append(reply.request_id)
        assert refused == [102, 103, 104, 105]
        assert await other.raw.silent()
        held.open()
        assert {(await one.raw.receive())[0].request_id for _ in range(2)} == {100, 101}
        assert (await one.store(store_of(prompt(CHUNK, 102), range(PER_CHUNK))))[2] == "stored"


async def test_workers_wait_for_their_own_turn_and_are_never_refused(run_dir: Path) -> None:
    cache = plain(seed=1)
    async with scene(run_dir, max_in_flight=2) as stage, cache.worker(stage.url, config=PATIENT) as worker:
        calls: list[Any] = [worker.store(prompt(CHUNK, seed), list(range(PER_CHUNK))) for seed in range(12)]
        assert {result.reason for result in await asyncio.gather(*calls)} == {"stored"}
        assert stage.server.status().wire.errors == {}


async def test_when_too_many_transfers_wait_the_next_one_is_told_to_come_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MOST_WAITING", 3)
    async with scene(run_dir, transfer_threads=1) as stage, registered(stage) as one:
        held = stage.host.hold("gather")
        await one.begin(Verb.STORE, 100, store_of(prompt(CHUNK, 0), range(PER_CHUNK)))
        await eventually(lambda: held.waiting)
        for number in range(101, 106):
            await one.begin(Verb.STORE, number, store_of(prompt(CHUNK, number), range(PER_CHUNK)))
        for number in (104, 105):
            reply, body = await one.raw.receive()
            error = parse_error(reply.code, body)
            assert isinstance(error, ServerBusy)
            assert (reply.request_id, error.limit, error.retry_after) == (number, 3, 0.1)
        assert await one.raw.silent()  # PINGs have a lane of their own
        assert stage.pool["reserved_chunks"] == 4
        held.open()
        assert {(await one.raw.receive())[0].request_id for _ in range(4)} == {100, 101, 102, 103}
        await stage.quiet()
        assert stage.pool["chunks"] == 4
        assert [event["kind"] for event in await stage.raw.events()] == ["registered"]


async def test_too_large_and_too_many_are_refused_on_real_sockets(run_dir: Path) -> None:
    told: dict[str, Any] = {"max_tokens": 2 * CHUNK, "max_blocks": 8, "max_message_bytes": "4KiB"}
    async with scene(run_dir, **told) as stage, registered(stage) as one:
        three = keys_of(prompt(3 * CHUNK))
        for payload, limit in (
            ([three, [packed(range(8))], 0, bytes(16)], 2 * CHUNK),
            ([three[:64], [packed([0] * 9)], 0, bytes(16)], 8),
            ([bytes(4096), [b""], 0, bytes(16)], 4096),
        ):
            error = await one.refused(Verb.STORE, payload)
            assert (type(error), error.limit) == (MessageTooLarge, limit)
        assert await one.raw.silent()
