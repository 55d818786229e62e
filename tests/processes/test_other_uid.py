"""Other users: those who are let in work like anybody, all others learn that they are not."""

import asyncio
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmlive.errors import InvalidHandle
from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.server.raw import Raw

FRIEND, STRANGER = 54_321, 54_322
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
    pytest.mark.timeout(60),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """Give a directory in which everybody may reach what is there."""
    path = Path(tempfile.mkdtemp(prefix="lm-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@asynccontextmanager
async def other(uid: int, what: str, url: str) -> AsyncIterator[dict[str, Any]]:
    """Run a process of another user, and give what it said; it lives until the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.processes.other_uid",
        str(uid),
        what,
        url,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        assert line, "it said nothing"
        yield json.loads(line)
        process.stdin.close()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def serve(place: Path, *more: str) -> ServerProcess:
    return ServerProcess("--pool-bytes", "64MiB", *more, run_dir=place / "run")


def modes(run_dir: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in (run_dir, *run_dir.iterdir())}


async def test_a_user_who_is_let_in_works_and_is_watched(place: Path) -> None:
    async with serve(place, "--allow-uid", str(FRIEND)) as server:
        assert modes(place / "run") == {
            "run": 0o711,
            "lock": 0o600,
            "router.sock": 0o666,
            "router.sock.lock": 0o600,
            "router.sock.tether": 0o666,
        }
        async with Raw(server.url) as raw:  # our own user is let in as well
            async with other(FRIEND, "work", server.url) as seen:
                assert (seen["healthy"], seen["same"]) == (True, True)
                assert (seen["stored"], seen["found"], seen["loaded"]) == (512, 512, 512)
                [instance] = (await raw.status())["instances"]
                assert instance["instance_id"] == seen["instance_id"]
                assert instance["evidence"] == "process"
            status = await raw.status()
            assert status["liveness"]["removals"]["unregistered"] == 1
            assert status["wire"]["handshake_failures"] == 0


async def test_any_other_user_is_refused_and_both_are_named(place: Path) -> None:
    async with serve(place, "--allow-uid", str(FRIEND)) as server:
        async with other(STRANGER, "enter", server.url) as seen:
            assert seen["error"] == "NotOwner"
            assert seen["uid"] == STRANGER
            assert seen["allowed"] == [os.geteuid(), FRIEND]
            assert f"uid {STRANGER} " in seen["text"]
            assert str(FRIEND) in seen["text"]
        async with other(STRANGER, "ping", server.url) as seen:
            assert seen["status"] == 1
            assert f"refused by {server.url}: uid {STRANGER} may not use this server, only 0, {FRIEND}" in seen["said"]
        async with Raw(server.url) as raw:
            status = await raw.status()
            assert status["wire"]["handshake_failures"] >= 1
            assert status["wire"]["frames"] == 0  # ours is counted when it is answered
            assert status["instances"] == []
        await eventually(lambda: f"uid {STRANGER}" in server.log or "handshake failed address=unix" in server.log)


async def test_by_default_no_other_user_is_let_in(place: Path) -> None:
    async with serve(place) as server:
        assert set(modes(place / "run").values()) == {0o700, 0o600}
        async with other(FRIEND, "enter", server.url) as seen:
            assert seen["error"] == "NotOwner"
            assert f"uid {FRIEND} may not use {place}/run/router.sock of uid {os.geteuid()}" in seen["text"]
        async with other(FRIEND, "ping", server.url) as seen:
            assert seen["status"] == 1
            assert "Permission denied" in seen["said"]
        async with Raw(server.url) as raw:
            assert (await raw.status())["wire"]["frames"] == 0


async def test_memory_of_another_user_must_be_sealed(place: Path) -> None:
    async with serve(place, "--allow-uid", str(FRIEND)) as server, other(FRIEND, "unsealed", server.url) as seen:
        code, text = seen["unsealed"]
        assert code == InvalidHandle.code
        assert "seal" in text
        assert seen["sealed"][0] == 0


async def test_what_a_killed_server_let_others_reach_is_private_again(place: Path) -> None:
    async with serve(place, "--allow-uid", str(FRIEND)) as server:
        server.kill()
        await server.wait()
    assert modes(place / "run")["run"] == 0o711
    async with serve(place):
        assert set(modes(place / "run").values()) == {0o700, 0o600}
    async with serve(place, "--allow-uid", str(FRIEND)):
        assert modes(place / "run")["run"] == 0o711


async def test_a_place_that_others_cannot_reach_is_told_of(place: Path) -> None:
    os.chmod(place, 0o700)  # noqa: PTH101 - before anything else runs
    async with serve(place, "--allow-uid", str(FRIEND)) as server:
        assert f"other users may not reach {place}/run/router.sock: {place} lets them not through" in server.log
