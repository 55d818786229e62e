"""The three ways to a process's descriptor, each end to end with the better ones switched off."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmlive.liveness.evidence import Evidence
from lmlive.server import evidence
from lmlive.server.evidence import open_by_pid
from lmlive.server.exits import start_time
from tests.conftest import eventually
from tests.modules.registry import BARE
from tests.server.tethered import WORKER, House, end_of, last_event, line_of, offer, say, start, worker

NO_SUCH_OPTION = 9999
WAYS = ("SCM_PIDFD", "SO_PEERPIDFD", "SO_PEERCRED")

pytestmark = pytest.mark.may_block  # reads /proc, which answers from memory


def leave_only(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the better ways off, as on an older kernel, and the worse ones too."""
    if way != "SCM_PIDFD":
        monkeypatch.setattr(evidence, "SO_PASSPIDFD", NO_SUCH_OPTION)
    if way != "SO_PEERPIDFD":
        monkeypatch.setattr(evidence, "SO_PEERPIDFD", NO_SUCH_OPTION)
    if way != "SO_PEERCRED":
        monkeypatch.setattr(evidence, "open_by_pid", lambda pid, started: -1)


@pytest.fixture
async def house(run_dir: Path) -> AsyncIterator[House]:
    built = await House(run_dir).open()
    yield built
    await built.close()


def evidence_of(house: House) -> tuple[Evidence, int | None]:
    record = house.record()
    assert record is not None
    return record.evidence, record.pid


@pytest.mark.parametrize("way", WAYS)
async def test_each_way_leads_to_the_process_and_its_exit(
    house: House, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    leave_only(way, monkeypatch)
    process = await worker(house)
    assert evidence_of(house) == (Evidence.PROCESS, process.pid)
    house.registry.register(**BARE)
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    event = last_event(house)
    assert (event["reason"], event["pid"], event["exit_signal"]) == ("exit", process.pid, 9)


@pytest.mark.parametrize("way", WAYS)
async def test_who_sends_is_not_always_who_connected(house: House, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    leave_only(way, monkeypatch)
    text = WORKER.replace("end.recv(1000)\n", "end.recv(1000)\nchild = os.fork()\nif child: time.sleep(60)\n", 1)
    connector = await start(text.format(address=str(house.path), packet=offer(), before="", then="print(os.getpid())"))
    sender = int(await line_of(connector))
    assert await line_of(connector) == "ready"
    house.registry.register(**BARE)
    # Only the first way knows of the sender; the others know of another process, and so of none.
    assert evidence_of(house) == (Evidence.PROCESS if way == "SCM_PIDFD" else Evidence.NONE, sender)
    connector.kill()
    await eventually(lambda: connector.returncode is not None)
    await say(await house.connect(), offer(secret=b"x" * 16))
    assert house.books.roster.tracked == 1
    os.kill(sender, 9)
    if way == "SCM_PIDFD":
        await eventually(lambda: house.books.roster.tracked == 0)
    else:
        await eventually(lambda: house.books.roster.snapshot()[0].suspect)
    await connector.communicate()


async def test_no_way_at_all_is_no_evidence(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_only("none", monkeypatch)
    process = await worker(house)
    assert evidence_of(house) == (Evidence.NONE, process.pid)
    house.registry.register(**BARE)
    await end_of(process)
    await eventually(lambda: house.books.roster.snapshot()[0].suspect)
    assert house.books.roster.tracked == 1


@pytest.mark.parametrize("way", WAYS)
async def test_without_evidence_none_of_the_ways_counts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    leave_only(way, monkeypatch)
    house = await House(run_dir, evidence=False).open()
    process = await worker(house)
    assert evidence_of(house) == (Evidence.NONE, process.pid)
    await end_of(process)
    await house.close()


def test_a_pid_that_is_gone_leads_nowhere() -> None:
    assert open_by_pid(2**22 - 1, 1) == -1


def test_a_pid_leads_to_who_was_started_then_and_to_nobody_else() -> None:
    started = start_time(os.getpid())
    assert started is not None
    assert open_by_pid(os.getpid(), started - 1) == -1
    pidfd = open_by_pid(os.getpid(), started)
    assert pidfd >= 0
    os.close(pidfd)
