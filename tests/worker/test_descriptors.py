"""Entering with hardly a descriptor left: refused with words, or it works."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lmlive.errors import ConfigError
from lmlive.worker import descriptors
from lmlive.worker.blocking import BlockingScheduler, BlockingWorker
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker
from tests.worker.fake_server import FakeServer
from tests.worker.workers import BLOCK_TOKENS, cache, fast

ROOT = Path(__file__).parents[2]


def made(kind: type, url: str) -> Worker | Scheduler | BlockingWorker | BlockingScheduler:
    memory = {"kv_caches": cache(), "block_tokens": BLOCK_TOKENS} if issubclass(kind, (Worker, BlockingWorker)) else {}
    found: Worker | Scheduler | BlockingWorker | BlockingScheduler = kind(url, model="m", config=fast(), **memory)
    return found


def leave(monkeypatch: pytest.MonkeyPatch, spare: int) -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(descriptors, "descriptors_in_use", lambda: allowed - spare)
    return allowed


@pytest.mark.parametrize("spare", [0, 9, 13, descriptors.ENTRY - 1])
@pytest.mark.parametrize("kind", [Worker, Scheduler])
async def test_without_enough_of_them_nothing_enters(
    server: FakeServer, kind: type, spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entering = made(kind, server.url)
    allowed = leave(monkeypatch, spare)
    assert isinstance(entering, Worker | Scheduler)
    with pytest.raises(ConfigError, match=r"open files.*ulimit -n") as caught:
        async with entering:
            pytest.fail("it entered")
    assert (caught.value.field, caught.value.value) == ("RLIMIT_NOFILE", allowed)
    assert server.requests == []


@pytest.mark.parametrize("kind", [BlockingWorker, BlockingScheduler])
def test_without_enough_of_them_nothing_blocking_enters(
    server: FakeServer, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    entering = made(kind, server.url)
    leave(monkeypatch, descriptors.ENTRY - 1)
    assert isinstance(entering, BlockingWorker | BlockingScheduler)
    with pytest.raises(ConfigError, match="open files"), entering:
        pytest.fail("it entered")


SCRIPT = """
import resource, sys
from lmlive.device.limits import descriptors_in_use
from lmlive.worker.blocking import BlockingWorker
from lmlive.worker.descriptors import ENTRY
from tests.worker.workers import BLOCK_TOKENS, cache, fast

memory = cache()
most = descriptors_in_use() + ENTRY + 3 + len(memory)  # three are the private loop's
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
with BlockingWorker(sys.argv[1], kv_caches=memory, block_tokens=BLOCK_TOKENS, model="m", config=fast()) as worker:
    assert worker.ping()
"""


def test_as_many_as_are_asked_for_are_enough(server: FakeServer) -> None:
    """In a process whose limit is just that: an abort of libzmq would end it."""
    outcome = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url], cwd=ROOT, capture_output=True, text=True, timeout=15, check=False
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")
