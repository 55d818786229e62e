"""A real server in a process of its own."""

import os
import signal
from pathlib import Path

import pytest

import lmlive.testing
from lmlive.testing import ServerProcess
from tests.conftest import eventually

SMALL = ("--pool-bytes", "1MiB")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def lies_at(path: Path) -> bool:
    return os.path.lexists(path)


async def test_it_serves_until_it_is_left(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        assert server.url == f"ipc://{run_dir}/router.sock"
        assert server.ready["http"] == "off"
        assert int(server.ready["pid"]) == server.pid
        assert server.epoch > 0
        assert "lmlive-nothing" not in " ".join(server.mappings())
        assert any("socket:" in target for target in server.descriptors().values())
        assert server.holds("lmlive-nothing") == []
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_it_ends_in_order(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        server.terminate()
        assert await server.wait() == 0
        server.kill()  # too late, and no harm
    assert not lies_at(run_dir / "router.sock")


async def test_it_is_stopped_continued_and_killed(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        server.stop()
        await eventually(lambda: state_of(server.pid) == "T")
        server.cont()
        await eventually(lambda: state_of(server.pid) != "T")
        server.kill()
        assert await server.wait() == -signal.SIGKILL


async def test_one_that_does_not_start_says_why(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        with pytest.raises(RuntimeError, match=f"in use by process {server.pid}"):
            async with ServerProcess(*SMALL, run_dir=run_dir):
                pytest.fail("two servers serve in one run directory")


async def test_one_that_was_not_started_has_no_pid(run_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="was not started"):
        assert ServerProcess(run_dir=run_dir).pid == os.getpid()


def test_all_public_names_are_there() -> None:
    for name in lmlive.testing.__all__:
        assert getattr(lmlive.testing, name).__doc__
