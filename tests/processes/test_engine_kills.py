"""Processes that copy by themselves and die in the middle of it, and what others see of what they stored."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmlive
from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.processes.kv_peer import BLOCK, BLOCKS, CHUNK, SHAPE, TOKENS, content, puppet
from tests.server.raw import Raw

FLAGS = ("--pool-bytes", "8MiB", "--chunk-tokens", str(CHUNK), "--bind", "tcp://127.0.0.1:0")
STRATEGIES = ("shm", "inline")


def server_in(run_dir: Path) -> ServerProcess:
    return ServerProcess(*FLAGS, "--bind", f"ipc://{run_dir}/router.sock", run_dir=run_dir)


def urls_of(server: ServerProcess) -> dict[str, str]:
    tcp, ipc = server.ready["bind"].split(",")
    return {"shm": ipc, "inline": tcp, "ipc": ipc}


def worker_of(url: str, memory: Any, **config: Any) -> lmlive.Worker:
    settings = lmlive.WorkerConfig(**config)
    return lmlive.Worker(url, kv_caches={"kv": memory}, block_tokens=BLOCK, model="m", block_axis=1, config=settings)


async def pool_of(raw: Raw) -> tuple[int, int, int, int, int]:
    pool = (await raw.status())["pool"]
    names = ("chunks", "used_bytes", "reserved_chunks", "held_back_chunks", "leased_chunks")
    chunks, used, reserved, held, leased = (pool[name] for name in names)
    return chunks, used, reserved, held, leased


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_worker_killed_between_prepare_and_commit_leaves_nothing(run_dir: Path, strategy: str) -> None:
    async with server_in(run_dir) as server:
        urls = urls_of(server)
        async with (
            Raw(urls["ipc"]) as raw,
            puppet(urls[strategy], "worker", mode="engine_driven", strategy=strategy) as a,
        ):
            await a.ask("hang")
            assert await a.ask("store") == {"copying": True}
            assert (await pool_of(raw))[2:] == (2, 0, 0)
            await a.kill()

            async def nothing() -> bool:
                return await pool_of(raw) == (0, 0, 0, 0, 0)

            await eventually(nothing)
            assert (await raw.status())["liveness"]["reaps"]["exit"] == 1
            memory = np.zeros(SHAPE, np.float32)
            async with worker_of(urls["ipc"], memory) as b:
                assert (await b.retrieve(TOKENS, BLOCKS)).reason == "miss"
                assert (await b.store(TOKENS, BLOCKS)).reason == "stored"


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_worker_killed_while_it_loads_pins_nothing(run_dir: Path, strategy: str) -> None:
    async with server_in(run_dir) as server:
        urls = urls_of(server)
        async with (
            Raw(urls["ipc"]) as raw,
            puppet(urls[strategy], "worker", mode="engine_driven", strategy=strategy) as a,
        ):
            assert (await a.ask("store"))["reason"] == "stored"
            await a.ask("hang")
            assert await a.ask("retrieve") == {"copying": True}
            assert (await pool_of(raw))[2:] == (0, 0, 2)
            await a.kill()

            async def unpinned() -> bool:
                return (await pool_of(raw))[2:] == (0, 0, 0)

            await eventually(unpinned)
            assert (await pool_of(raw))[0] == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_another_process_stored_is_loaded_bit_by_bit_whoever_copied(run_dir: Path, strategy: str) -> None:
    async with server_in(run_dir) as server:
        urls = urls_of(server)
        wanted = content()[:, BLOCKS]
        async with puppet(urls["ipc"], "worker", mode="server_driven") as a:
            assert (await a.ask("store"))["reason"] == "stored"
            memory = np.zeros(SHAPE, np.float32)
            async with worker_of(urls[strategy], memory, mode="engine_driven", strategy=strategy) as b:
                assert (await b.retrieve(TOKENS, BLOCKS)).reason == "loaded"
            assert memory[:, BLOCKS].tobytes() == wanted.tobytes()
            async with Raw(urls["ipc"]) as raw:
                await raw.result(Verb.CLEAR, [None])
                async with puppet(urls[strategy], "worker", mode="engine_driven", strategy=strategy) as c:
                    assert (await c.ask("store"))["reason"] == "stored"
            shared = lmlive.shared_empty(SHAPE, "float32")
            async with worker_of(urls["ipc"], shared, mode="server_driven") as d:
                assert (await d.retrieve(TOKENS, BLOCKS)).reason == "loaded"
            assert shared[:, BLOCKS].tobytes() == wanted.tobytes()


async def test_a_server_that_is_killed_takes_its_pool_with_it(run_dir: Path) -> None:
    def mapped() -> bool:
        return "lmlive-pool" in Path("/proc/self/maps").read_text()

    async with (
        server_in(run_dir) as server,
        worker_of(urls_of(server)["shm"], np.zeros(SHAPE, np.float32)) as worker,
    ):
        assert (await worker.store(TOKENS, BLOCKS)).reason == "stored"
        assert mapped()
        server.kill()
        await server.wait()
        await eventually(lambda: not mapped())
        assert (await worker.store(TOKENS, BLOCKS)).reason == "unhealthy"
