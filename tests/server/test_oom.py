"""A worker that the kernel kills for want of memory: a real cgroup, and a real kill."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import eventually
from tests.modules.registry import BARE
from tests.server.oom import MemoryLimit, make_memory_limit
from tests.server.tethered import House, end_of, last_event, worker

GROW = """
print("ready", flush=True)
os.read(0, 1)
grown = []
while True:
    grown.append(bytearray(1 << 20))
    grown[-1][::4096] = b"x" * 256
"""

pytestmark = pytest.mark.may_block  # writes into the cgroup


@pytest.fixture
async def limit() -> AsyncIterator[MemoryLimit]:
    made = make_memory_limit()
    yield made
    await eventually(made.close)


@pytest.fixture
async def house(run_dir: Path) -> AsyncIterator[House]:
    built = await House(run_dir).open()
    yield built
    await built.close()


def enter(limit: MemoryLimit) -> str:
    return f"open({str(limit.procs)!r}, 'w').write(str(os.getpid()))"


async def test_an_oom_kill_is_named_in_the_log_and_the_event(
    house: House, limit: MemoryLimit, caplog: pytest.LogCaptureFixture
) -> None:
    process = await worker(house, GROW, before=enter(limit), stdin=True)
    house.registry.register(**BARE)
    await process.communicate(b"x")
    await eventually(lambda: house.books.roster.tracked == 0)
    event = last_event(house)
    assert (event["reason"], event["exit_status"], event["exit_signal"], event["oom_killed"]) == ("exit", None, 9, True)
    assert "exit_signal=9 oom_killed=True" in caplog.text


async def test_a_plain_kill_beside_an_earlier_oom_kill_is_none(house: House, limit: MemoryLimit) -> None:
    first = await worker(house, GROW, before=enter(limit), stdin=True)
    await first.communicate(b"x")
    await eventually(lambda: house.record() is None)
    process = await worker(house, before=enter(limit))
    house.books.roster._ended.clear()
    house.registry.register(**BARE)
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    event = last_event(house)
    assert (event["reason"], event["exit_signal"], event["oom_killed"]) == ("exit", 9, False)
