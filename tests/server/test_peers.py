"""Whose process is at the other end of a tether, and what its end means: on real sockets and real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lmlive.errors import NotOwner, UnknownInstance
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.roster import Reason, Registration
from lmlive.modules.channels import SUSPICION_SECONDS
from lmlive.modules.management import hash_secret
from lmlive.modules.tethers import close_all
from lmlive.protocol.tether import Receipt
from lmlive.protocol.verbs import Role
from lmlive.server import evidence
from lmlive.server.peers import PARTING_SECONDS
from tests.conftest import eventually
from tests.modules.registry import BARE, NBYTES, OTHER, SECRET
from tests.server.tethered import (
    WORKER,
    House,
    end_of,
    last_event,
    line_of,
    memory_files,
    offer,
    part,
    say,
    start,
    worker,
)


@pytest.fixture
async def house(run_dir: Path) -> AsyncIterator[House]:
    built = await House(run_dir).open()
    yield built
    await built.close()


def live(house: House, instance_id: int = 7) -> Registration:
    registration = house.books.roster.get(instance_id)
    assert registration is not None
    return registration


def scan(house: House, seconds: float) -> list[Reason]:
    """Let so much time pass in silence, and give the verdicts of a scan then."""
    for _ in range(round(seconds)):
        house.registry.pass_time(1.0)
    return [removal.reason for removal in house.books.roster.scan(house.books.moment()).removals]


async def gone(house: House) -> None:
    await eventually(lambda: house.books.roster.tracked == 0)


# The socket's end


async def test_a_tether_speaks_for_one_worker(house: House) -> None:
    end = await house.connect()
    await say(end, offer())
    assert isinstance(await say(end, offer(secret=OTHER)), NotOwner)
    assert house.record() is not None
    assert not house.books.tethers[hash_secret(SECRET)].open


async def test_the_end_of_the_socket_is_suspicion_and_a_new_one_clears_it(house: House) -> None:
    end = await house.connect()
    await say(end, offer())
    house.registry.register(**BARE)
    assert live(house).shown_alive
    end.close()
    await eventually(lambda: live(house).suspect)
    assert not live(house).shown_alive
    assert house.registry.kinds() == ["registered"]
    house.registry.pass_time(SUSPICION_SECONDS)
    assert house.registry.kinds() == ["registered", "suspect"]
    again = await house.connect()
    await say(again, offer())
    assert live(house).shown_alive
    assert house.books.roster.generation_of(7) == 1


async def test_a_tether_that_is_back_at_once_is_not_reported(house: House) -> None:
    end = await house.connect()
    await say(end, offer())
    house.registry.register(**BARE)
    end.close()
    await eventually(lambda: live(house).suspect)
    await say(await house.connect(), offer())
    house.registry.pass_time(SUSPICION_SECONDS)
    assert house.registry.kinds() == ["registered"]


@pytest.mark.parametrize("pinged", [True, False])
async def test_a_hold_ends_when_the_tether_closes(house: House, pinged: bool) -> None:
    end = await house.connect()
    await say(end, offer())
    house.registry.register(**BARE)
    budget, reason = (120, Reason.SILENCE) if pinged else (3600, Reason.NEVER_PINGED)
    if pinged:
        house.books.roster.touch(7, 1, house.books.moment(), prove=True)
    assert scan(house, budget + 1) == []
    assert live(house).held
    end.close()
    await eventually(lambda: not live(house).held)
    assert scan(house, 0) == [reason]


async def test_a_tether_of_another_worker_neither_ends_nor_prolongs_a_hold(house: House) -> None:
    end = await house.connect()
    await say(end, offer())
    house.registry.register(**BARE)
    assert scan(house, 3601) == []
    stranger = await house.connect()
    assert await say(stranger, offer(secret=OTHER)) == Receipt(0)  # it names the same instance
    stranger.close()
    await eventually(lambda: house.tethers.connections == 1)
    assert (live(house).held, live(house).suspect, live(house).tether_open) == (True, False, True)
    end.close()
    await eventually(lambda: not live(house).held)
    await say(await house.connect(), offer(secret=OTHER))
    assert not live(house).tether_open
    assert scan(house, 0) == [Reason.NEVER_PINGED]


async def test_a_second_tether_takes_the_place_of_the_first(house: House) -> None:
    first = await house.connect()
    await say(first, offer())
    house.registry.register(**BARE)
    second = await house.connect()
    await say(second, offer())
    assert house.tethers.connections == 1
    assert scan(house, 3601) == []
    first.close()
    await say(second, offer())
    assert live(house).tether_open  # the first one's end came and meant nothing
    second.close()
    await eventually(lambda: not live(house).held)
    assert scan(house, 0) == [Reason.NEVER_PINGED]


async def test_an_older_generations_process_and_tether_never_touch_a_new_one(house: House) -> None:
    process = await worker(house)
    house.registry.register(**BARE)
    removal = house.books.roster.reap(7, None, Reason.REQUESTED, house.books.moment())
    assert removal is not None
    house.registry.register(**BARE, secret=OTHER)
    assert (live(house).generation, live(house).evidence) == (2, Evidence.NONE)
    await end_of(process)
    await eventually(lambda: house.record() is None)
    assert live(house).generation == 2
    assert not live(house).suspect


# Who is watched, and for how long


async def test_a_process_that_left_nothing_is_forgotten(house: House) -> None:
    await part(house)
    house.registry.clock.advance(PARTING_SECONDS)
    house.tethers.sweep()
    assert len(house.books.tethers) == 1
    house.registry.clock.advance(0.1)
    house.tethers.sweep()
    assert house.books.tethers == {}
    assert len(house.tethers.peers) == 0


async def test_a_process_is_watched_while_a_lease_or_a_registration_is_its_own(house: House) -> None:
    lease = house.books.leases.open(hash_secret(SECRET), {0: {}}, 0.0)
    await part(house)
    house.registry.register(**BARE, secret=OTHER)
    await part(house, Role.WORKER, OTHER)
    house.registry.clock.advance(1000)
    house.tethers.sweep()
    assert len(house.books.tethers) == 2
    house.books.leases.end(lease, 0.0)
    house.tethers.sweep()
    assert list(house.books.tethers) == [hash_secret(OTHER)]
    house.registry.unregister(secret=OTHER)
    house.tethers.sweep()
    assert house.books.tethers == {}
    house.registry.release_all()


async def test_a_process_is_watched_while_its_handles_are_being_opened(house: House) -> None:
    end = await house.connect()
    [fd] = memory_files(1)
    os.truncate(fd, NBYTES)
    await say(end, offer(1), [fd])
    opening = house.registry.register()
    end.close()
    close_all([fd])
    await eventually(lambda: not house.books.tethers[hash_secret(SECRET)].open)
    house.registry.clock.advance(1000)
    house.tethers.sweep()
    assert len(house.books.tethers) == 1
    opening.run()
    house.registry.unregister()
    house.registry.release_all()


async def test_without_evidence_descriptors_come_and_exits_do_not_count(run_dir: Path) -> None:
    house = await House(run_dir, evidence=False).open()
    fds = memory_files(1)
    end = await house.connect()
    await say(end, offer(1), fds)
    record = house.books.tethers[hash_secret(SECRET)]
    assert (record.evidence, record.pid, record.table.held) == (Evidence.NONE, os.getpid(), 1)
    close_all(fds)
    process = await worker(house, packet=offer(secret=OTHER))
    house.registry.register(**BARE, secret=OTHER)
    await end_of(process)
    await eventually(lambda: live(house).suspect)
    assert scan(house, 3600) == []
    assert scan(house, 1) == [Reason.NEVER_PINGED]
    await house.close()


# The process's end


@pytest.mark.parametrize("pinged", [False, True])
async def test_a_killed_process_is_reaped_at_once_though_it_never_pinged(house: House, pinged: bool) -> None:
    process = await worker(house)
    house.registry.register(**BARE)
    if pinged:
        house.books.roster.touch(7, 1, house.books.moment(), prove=True)
    house.books.leases.open(hash_secret(SECRET), {0: {}}, 0.0)
    await end_of(process)
    await gone(house)
    event = last_event(house)
    assert (event["kind"], event["reason"], event["pid"]) == ("reaped", "exit", process.pid)
    assert (event["exit_status"], event["exit_signal"]) == (None, signal.SIGKILL)
    assert len(house.books.leases) == 0
    assert house.record() is None
    refused = house.registry.register(**BARE).answer
    assert refused is not None
    assert "make a new worker" in str(refused)


async def test_an_exit_status_is_in_the_event(house: House, caplog: pytest.LogCaptureFixture) -> None:
    process = await worker(house, "print('ready', flush=True)\nos.read(0, 1)\nos._exit(7)", stdin=True)
    house.registry.register(**BARE)
    await process.communicate(b"x")
    await gone(house)
    event = last_event(house)
    assert (event["exit_status"], event["exit_signal"], event["oom_killed"]) == (7, None, False)
    assert "exit_status=7 oom_killed=False" in caplog.text


async def test_a_process_that_ends_while_its_handles_are_being_opened_is_never_registered(house: House) -> None:
    process = await worker(house)
    house.books.tethers[hash_secret(SECRET)].table.add(os.memfd_create("lmlive-tether-test"))
    opening = house.registry.register()
    assert len(house.books.openings) == 1
    await end_of(process)
    await eventually(lambda: house.record() is None)
    assert isinstance(opening.run().answer, UnknownInstance)
    assert house.books.roster.tracked == 0
    assert house.books.roster.generations == 0
    assert house.registry.release_all() == 1
    assert "registered" not in house.registry.kinds()


async def test_a_child_that_holds_the_socket_does_not_hide_the_exit(house: House) -> None:
    then = "child = os.fork()\nif child == 0:\n    time.sleep(60)\nprint(child, flush=True)"
    process = await start(WORKER.format(address=str(house.path), packet=offer(), before="", then=then))
    child = int(await line_of(process))
    house.registry.register(**BARE)
    process.kill()
    await gone(house)
    assert last_event(house)["reason"] == "exit"
    os.kill(child, signal.SIGKILL)
    await process.communicate()


async def test_a_process_that_closes_its_tether_is_still_watched(house: House) -> None:
    process = await worker(house, "end.close()")
    house.registry.register(**BARE)
    await eventually(lambda: not house.books.tethers[hash_secret(SECRET)].open)
    assert house.books.roster.tracked == 1
    await end_of(process)
    await gone(house)
    assert last_event(house)["reason"] == "exit"


async def test_a_schedulers_exit_does_not_count_among_ended_secrets(house: House) -> None:
    await end_of(await worker(house, packet=offer(role=Role.SCHEDULER, instance_id=0)))
    await eventually(lambda: house.record() is None)
    assert not house.books.roster.secret_ended(hash_secret(SECRET))


@pytest.mark.parametrize("role", [Role.WORKER, Role.SCHEDULER])
async def test_what_a_process_had_asked_for_leases_nothing_once_it_ended(house: House, role: Role) -> None:
    await end_of(await worker(house, packet=offer(role=role, instance_id=7 if role is Role.WORKER else 0)))
    await eventually(lambda: house.record() is None)
    with pytest.raises(UnknownInstance):
        house.books.leases.open(hash_secret(SECRET), {0: {}}, 0.0)


async def test_another_process_cannot_take_a_tether_over(house: House) -> None:
    process = await worker(house)
    end = await house.connect()
    refused = await say(end, offer())
    assert isinstance(refused, NotOwner)
    assert refused.pid == process.pid
    assert house.books.tethers[hash_secret(SECRET)].open
    await end_of(process)
    await eventually(lambda: house.record() is None)


async def test_nor_can_it_while_the_first_one_lives_without_its_tether(house: House) -> None:
    """Else the end of the second would be taken for the end of the first."""
    process = await worker(house, then="print('ready', flush=True)\nend.close()\nos.read(0, 1)", stdin=True)
    house.registry.register(**BARE)
    await eventually(lambda: (record := house.record()) is not None and not record.open)
    refused = await say(await house.connect(), offer())
    assert isinstance(refused, NotOwner)
    assert refused.pid == process.pid
    assert house.books.roster.tracked == 1
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    assert await say(await house.connect(), offer()) == Receipt(0)


async def test_an_exit_that_was_not_read_yet_is_not_forgotten_for_a_new_tether(house: House) -> None:
    process = await worker(house)
    house.registry.register(**BARE)
    [peer] = house.tethers.peers._all
    assert peer.process is not None
    asyncio.get_running_loop().remove_reader(peer.process.pidfd)  # as if the loop had not come to it
    await end_of(process)
    assert await say(await house.connect(), offer()) == Receipt(0)
    assert house.books.roster.tracked == 0
    assert last_event(house)["reason"] == "exit"
    record = house.record()
    assert record is not None
    assert record.pid == os.getpid()
    assert isinstance(house.registry.register(**BARE).answer, UnknownInstance)


async def test_a_process_that_is_known_stays_so_when_a_later_tether_does_not_name_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name_nobody(*_: object) -> None:
        return None

    process = await worker(house, before=_ON_REQUEST, then="print('ready', flush=True)\nrepeat()", stdin=True)
    house.registry.register(**BARE)
    monkeypatch.setattr(evidence, "SO_PASSPIDFD", 9999)
    monkeypatch.setattr(evidence, "SO_PEERPIDFD", 9999)
    monkeypatch.setattr(evidence, "start_time", name_nobody)
    assert process.stdin is not None
    process.stdin.write(b"x")
    assert await line_of(process) == "again"
    record = house.record()
    assert record is not None
    assert (record.evidence, record.pid, record.open) == (Evidence.PROCESS, process.pid, True)
    assert len(house.tethers.peers) == 1
    await end_of(process)
    await gone(house)
    assert last_event(house)["reason"] == "exit"


_ON_REQUEST = """
def repeat():
    os.read(0, 1)
    again = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    again.connect(end.getpeername())
    again.recv(1000)
    again.send(PACKET)
    again.recv(1000)
    print("again", flush=True)
    time.sleep(60)
"""
