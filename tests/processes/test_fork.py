"""Forks, and ends without goodbye, of processes that have workers open; each in a process of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.processes.short import Stage, both_ways
from tests.server.raw import Raw

ROOT = Path(__file__).parents[2]
PATIENCE = 15.0

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def running(url: str, scenario: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.processes.forks",
        url,
        scenario,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate(b"")  # ends its input, and with it whoever has inherited that


async def ended(url: str, scenario: str) -> str:
    async with running(url, scenario) as process:
        out, err = await process.communicate()
        assert (process.returncode, out.decode()) == (0, "fine\n"), err.decode()
        return err.decode()


@pytest.mark.parametrize("scenario", ["exits", "own", "busy", "awaited", "pools"])
async def test_a_fork_is_refused_and_does_no_harm(run_dir: Path, scenario: str) -> None:
    async with ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir) as server, Raw(server.url) as raw:
        await ended(server.url, scenario)
        told = await raw.status()
        assert told["instances"] == []
        assert told["liveness"]["reaps"] == {"exit": 0, "silence": 0, "never_pinged": 0, "target": 0}
        assert told["liveness"]["removals"]["superseded"] == 0


async def test_the_end_of_a_process_is_seen_though_a_child_holds_its_sockets(run_dir: Path) -> None:
    """By silence alone as well: the child says nothing, and its descriptors are no sign of life."""

    async def play(at: Stage) -> None:
        before = at.held()
        async with running(at.server.url, "outlived") as process:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"fine\n"

            async def reaped() -> bool:
                return bool((await at.raw.status())["liveness"]["reaps"]["exit" if at.evidence else "silence"] == 1)

            await eventually(reaped, within=PATIENCE)
            await eventually(at.owes_nothing, within=PATIENCE)
            assert await at.instances() == {}
            assert at.held().segments == before.segments
        await at.holds_only(before)  # the child's end has ended the rest

    await both_ways(run_dir, play, "--pool-bytes", "64MiB")


async def test_an_interpreter_that_ends_without_closing_says_goodbye_and_nothing_else(run_dir: Path) -> None:
    async with ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir) as server, Raw(server.url) as raw:
        assert await ended(server.url, "left_open") == ""
        assert (await raw.status())["liveness"]["removals"]["unregistered"] == 1


async def test_an_interpreter_that_ends_without_closing_does_not_wait_for_a_stopped_server(run_dir: Path) -> None:
    async with (
        ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir) as server,
        running(server.url, "left_open") as process,
    ):
        assert process.stdout is not None
        assert await process.stdout.readline() == b"fine\n"
        server.stop()
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()
