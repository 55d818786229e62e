import array
import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from lmlive.errors import InvalidHandle, InvalidPayload, LMLiveError, NotOwner, ServerBusy
from lmlive.liveness.evidence import Evidence
from lmlive.modules.management import hash_secret
from lmlive.modules.tethers import close_all
from lmlive.protocol.tether import MAX_PACKET_BYTES, Greeting, Offer, Receipt, decode_answer
from lmlive.protocol.verbs import Role
from lmlive.server import evidence
from lmlive.server.lanes import in_thread
from lmlive.server.rundir import RunDir
from lmlive.server.tether import PARTING_SECONDS, SUSPICION_SECONDS, UNUSED_SECONDS, Tethers
from tests.conftest import eventually
from tests.modules.registry import BARE, NBYTES, OTHER, SECRET, Registry

Connect = Callable[[], Awaitable[socket.socket]]


class House:
    """A tether listener, and the far ends of its connections."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.registry = Registry(**settings)
        self.books = self.registry.books
        self.path = run_dir / "router.sock.tether"
        self._ends: list[socket.socket] = []
        self._run_dir = RunDir(run_dir)
        self.tethers = Tethers(self.books, close_all)

    async def open(self) -> Self:
        await in_thread(self._run_dir.open)
        self.tethers.take(await in_thread(lambda: self._run_dir.tether(self.path.with_suffix(""))))
        self.tethers.open()
        return self

    async def close(self) -> None:
        self.tethers.close()
        await in_thread(self._run_dir.close)
        for end in self._ends:
            end.close()

    async def connect(self) -> socket.socket:
        """Connect and take the greeting."""
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.setblocking(False)
        self._ends.append(end)
        await asyncio.get_running_loop().sock_connect(end, str(self.path))
        assert Greeting.decode(await receive(end)) == Greeting(self.books.epoch)
        return end

    def record(self, secret: bytes = SECRET) -> object:
        return self.books.tethers.get(hash_secret(secret))


@pytest.fixture
async def house(run_dir: Path) -> AsyncIterator[House]:
    built = await House(run_dir).open()
    yield built
    await built.close()


async def receive(end: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, MAX_PACKET_BYTES), 5)


async def say(end: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> Receipt | LMLiveError:
    """Send a packet with copies of descriptors, and take the answer."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([packet], rights)
    return decode_answer(await receive(end))


def offer(
    count: int = 0, first: int = 0, *, secret: bytes = SECRET, instance_id: int = 7, role: Role = Role.WORKER
) -> bytes:
    return Offer(secret, instance_id, role, first, count).encode()


def memory_files(count: int) -> list[int]:
    return [os.memfd_create("lmlive-tether-test") for _ in range(count)]


def open_files() -> int:
    links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("lmlive-tether-test" in str(link.readlink()) for link in links)


async def test_an_offer_is_received_and_its_process_named(house: House) -> None:
    end = await house.connect()
    fds = memory_files(3)
    assert await say(end, offer(2), fds[:2]) == Receipt(2)
    assert await say(end, offer(1, 2), fds[2:]) == Receipt(3)
    record = house.books.tethers[hash_secret(SECRET)]
    assert (record.pid, record.evidence, record.open, record.table.held) == (os.getpid(), Evidence.PROCESS, True, 3)
    assert [slot.inode for slot in record.table.slots] == [os.fstat(fd).st_ino for fd in fds]
    assert record.table.uid == os.getuid()
    assert await say(end, offer(1), fds[:1]) == Receipt(1)
    assert record.table.held == 1
    close_all(fds)
    assert open_files() == 1
    house.tethers.close()
    assert open_files() == 0


@pytest.mark.parametrize(
    "packet",
    [b"\xc1", b"", offer(3), offer(2, 1), Offer(SECRET, 7, Role.WORKER, 0, 2).encode()[:-1], b"x" * 70_000],
)
async def test_a_bad_offer_is_refused_and_every_descriptor_is_closed(house: House, packet: bytes) -> None:
    end = await house.connect()
    fds = memory_files(2)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    assert isinstance(await say(end, packet, fds), InvalidPayload)
    assert await receive(end) == b""
    close_all(fds)
    assert open_files() == 0
    assert house.books.errors["InvalidPayload"] == 1


async def test_more_descriptors_than_a_packet_may_bring_are_all_closed(house: House) -> None:
    end = await house.connect()
    fds = memory_files(100)
    assert isinstance(await say(end, offer(64), fds), InvalidPayload)
    close_all(fds)
    assert open_files() == 0


async def test_a_full_server_takes_no_descriptors(house: House) -> None:
    house.tethers._most_fds = 2
    end = await house.connect()
    fds = memory_files(3)
    refused = await say(end, offer(3), fds)
    assert isinstance(refused, ServerBusy)
    assert refused.limit == 2
    close_all(fds)
    assert open_files() == 0


async def test_too_many_tethers_are_told_so(run_dir: Path) -> None:
    house = await House(run_dir, max_connections=1).open()
    first = await house.connect()
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, str(house.path))
    assert isinstance(decode_answer(await receive(end)), ServerBusy)
    assert await receive(end) == b""
    assert house.tethers.connections == 1
    assert first.fileno() >= 0
    end.close()
    await house.close()


async def test_a_foreign_user_is_refused_by_name(house: House) -> None:
    house.tethers._allowed = {os.getuid() + 1}
    end = await house.connect()
    fds = memory_files(1)
    refused = await say(end, offer(1), fds)
    assert isinstance(refused, NotOwner)
    assert (refused.uid, refused.allowed) == (os.getuid(), [os.getuid() + 1])
    assert str(os.getuid()) in str(refused)
    close_all(fds)
    assert open_files() == 0


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
    live = house.books.roster.get(7)
    assert live is not None
    assert live.shown_alive
    end.close()
    await eventually(lambda: live.suspect)
    assert not live.shown_alive
    assert house.registry.kinds() == ["registered"]
    house.registry.pass_time(SUSPICION_SECONDS)
    assert house.registry.kinds() == ["registered", "suspect"]
    again = await house.connect()
    await say(again, offer())
    assert live.shown_alive
    assert house.books.roster.generation_of(7) == 1


async def test_unused_descriptors_are_closed(house: House) -> None:
    end = await house.connect()
    fds = memory_files(2)
    await say(end, offer(2), fds)
    close_all(fds)
    house.registry.clock.advance(UNUSED_SECONDS)
    house.tethers.sweep()
    assert open_files() == 2
    house.registry.clock.advance(0.1)
    house.tethers.sweep()
    assert open_files() == 0


async def part(house: House, role: Role = Role.SCHEDULER, secret: bytes = SECRET) -> None:
    """Open a tether, and close it again."""
    end = await house.connect()
    await say(end, offer(instance_id=0 if role is Role.SCHEDULER else 7, role=role, secret=secret))
    end.close()
    await eventually(lambda: not house.books.tethers[hash_secret(secret)].open)


async def test_a_process_that_left_nothing_is_forgotten(house: House) -> None:
    await part(house)
    house.registry.clock.advance(PARTING_SECONDS)
    house.tethers.sweep()
    assert len(house.books.tethers) == 1
    house.registry.clock.advance(0.1)
    house.tethers.sweep()
    assert house.books.tethers == {}
    assert house.tethers._peers == set()


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


async def test_sockets_that_stand_are_what_the_limit_counts(run_dir: Path) -> None:
    house = await House(run_dir, max_connections=2).open()
    for number in range(3):
        await part(house, secret=bytes([number]) * 16)
    assert house.tethers.connections == 0
    assert len(house.books.tethers) == 3
    await say(await house.connect(), offer())
    assert house.tethers.connections == 1
    await house.close()
    assert house.tethers.connections == 0


async def test_a_socket_that_says_nothing_is_cut_off(run_dir: Path) -> None:
    house = await House(run_dir, max_connections=2).open()
    silent, speaker = await house.connect(), await house.connect()
    await say(speaker, offer())
    house.registry.clock.advance(UNUSED_SECONDS)
    house.tethers.sweep()
    assert house.tethers.connections == 2
    house.registry.clock.advance(0.1)
    house.tethers.sweep()
    assert house.tethers.connections == 1
    assert await receive(silent) == b""
    assert len(house.tethers._peers) == 1
    await house.connect()
    await house.close()


async def test_a_schedulers_exit_does_not_count_among_ended_secrets(house: House) -> None:
    text = WORKER.replace("7, 1, 0, 0", "0, 2, 0, 0")
    process = await worker(house, text=text)
    await end_of(process)
    await eventually(lambda: house.record() is None)
    assert not house.books.roster.secret_ended(hash_secret(SECRET))


async def test_a_descriptor_of_another_kind_is_refused_and_nobody_asks_its_file(house: House) -> None:
    given_up: list[int] = []
    house.tethers._discard = given_up.extend
    end = await house.connect()
    files = [*memory_files(1), os.open("/proc/self/status", os.O_RDONLY), *os.pipe()]
    refused = await say(end, offer(4), files)
    assert isinstance(refused, InvalidHandle)
    assert refused.index == 1
    assert house.record() is None
    assert len(given_up) == 5  # with the socket itself
    close_all([*files, *given_up])


async def test_a_file_of_dev_shm_is_shared_memory(house: House) -> None:
    end = await house.connect()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        assert await say(end, offer(1), [file.fileno()]) == Receipt(1)
    house.tethers.close()


async def test_what_closes_a_large_file_is_never_the_loop(house: House) -> None:
    given_up: list[int] = []
    house.tethers._waiting.discard = house.tethers._discard = given_up.extend
    end = await house.connect()
    fds = memory_files(2)
    await say(end, offer(2), fds)
    close_all(fds)
    end.close()
    await eventually(lambda: house.tethers.connections == 0)
    assert open_files() == 2
    assert len(given_up) == 3
    close_all(given_up)


async def test_without_evidence_descriptors_come_and_exits_do_not_count(run_dir: Path) -> None:
    house = await House(run_dir, evidence=False).open()
    end = await house.connect()
    fds = memory_files(1)
    await say(end, offer(1), fds)
    record = house.books.tethers[hash_secret(SECRET)]
    assert (record.evidence, record.pid, record.table.held) == (Evidence.NONE, os.getpid(), 1)
    close_all(fds)
    await house.close()


WORKER = """
import os, socket, sys, time
sys.path[:0] = {path!r}
from lmlive.protocol.tether import Offer
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect({address!r})
end.recv(1000)
end.send(Offer({secret!r}, 7, 1, 0, 0).encode())
end.recv(1000)
{then}
print("ready", flush=True)
time.sleep(60)
"""


async def worker(house: House, then: str = "", text: str = WORKER) -> asyncio.subprocess.Process:
    """Start a process that holds a tether."""
    text = text.format(path=sys.path, address=str(house.path), secret=SECRET, then=then)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 10) == b"ready\n"
    return process


async def end_of(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.communicate()


async def test_a_killed_process_is_reaped_at_once_though_it_never_pinged(house: House) -> None:
    process = await worker(house)
    house.registry.register(**BARE)
    house.books.leases.open(hash_secret(SECRET), {0: {}}, 0.0)
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    event = house.books.events.after(0, 100)[-1]
    assert (event["kind"], event["reason"], event["pid"]) == ("reaped", "exit", process.pid)
    assert (event["exit_status"], event["exit_signal"]) == (None, signal.SIGKILL)
    assert len(house.books.leases) == 0
    assert house.record() is None
    refused = house.registry.register(**BARE).answer
    assert refused is not None
    assert "make a new worker" in str(refused)


async def test_a_child_that_holds_the_socket_does_not_hide_the_exit(house: House) -> None:
    then = "child = os.fork()\nif child == 0:\n    time.sleep(60)\nprint(child, flush=True)"
    text = WORKER.format(path=sys.path, address=str(house.path), secret=SECRET, then=then)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child = int(await asyncio.wait_for(process.stdout.readline(), 10))
    house.registry.register(**BARE)
    process.kill()
    await eventually(lambda: house.books.roster.tracked == 0)
    assert house.books.events.after(0, 100)[-1]["reason"] == "exit"
    os.kill(child, signal.SIGKILL)
    await process.communicate()


async def test_a_process_that_closes_its_tether_is_still_watched(house: House) -> None:
    process = await worker(house, "end.close()")
    house.registry.register(**BARE)
    await eventually(lambda: not house.books.tethers[hash_secret(SECRET)].open)
    assert house.books.roster.tracked == 1
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    assert house.books.events.after(0, 100)[-1]["reason"] == "exit"


async def test_another_process_cannot_take_a_tether_over(house: House) -> None:
    process = await worker(house)
    end = await house.connect()
    refused = await say(end, offer())
    assert isinstance(refused, NotOwner)
    assert refused.pid == process.pid
    assert house.books.tethers[hash_secret(SECRET)].open
    await end_of(process)
    await eventually(lambda: house.record() is None)


@pytest.mark.may_block  # reads /proc, which answers from memory
async def test_without_the_newer_options_the_pid_leads_to_the_process(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "SO_PASSPIDFD", 9999)
    monkeypatch.setattr(evidence, "SO_PEERPIDFD", 9999)
    house = await House(run_dir).open()
    process = await worker(house)
    record = house.books.tethers[hash_secret(SECRET)]
    assert (record.evidence, record.pid) == (Evidence.PROCESS, process.pid)
    house.registry.register(**BARE)
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    await house.close()


async def test_with_the_peers_pidfd_alone_the_exit_is_seen(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "SO_PASSPIDFD", 9999)
    monkeypatch.setattr(evidence, "open_by_pid", lambda pid: -1)
    house = await House(run_dir).open()
    process = await worker(house)
    house.registry.register(**BARE)
    await end_of(process)
    await eventually(lambda: house.books.roster.tracked == 0)
    await house.close()


async def test_no_pidfd_at_all_is_no_evidence(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SO_PASSPIDFD", "SO_PEERPIDFD"):
        monkeypatch.setattr(evidence, name, 9999)
    monkeypatch.setattr(evidence, "open_by_pid", lambda pid: -1)
    house = await House(run_dir).open()
    end = await house.connect()
    await say(end, offer())
    assert house.books.tethers[hash_secret(SECRET)].evidence is Evidence.NONE
    await house.close()


@pytest.mark.may_block  # waits for children
@pytest.mark.parametrize("reaped", [True, False])
@pytest.mark.parametrize(
    ("code", "end"), [("raise SystemExit(3)", (3, None)), ("import os; os.kill(os.getpid(), 9)", (None, 9))]
)
def test_the_kernel_tells_how_a_process_ended(reaped: bool, code: str, end: tuple[int | None, int | None]) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    pidfd = os.pidfd_open(process.pid)
    select.select([pidfd], [], [])
    if reaped:
        process.wait()
        if evidence.read_exit(pidfd, None).status is evidence.read_exit(pidfd, None).signal is None:
            pytest.skip("this kernel forgets it")
    assert evidence.read_exit(pidfd, process.pid) == (process.pid, *end)
    process.wait()
    os.close(pidfd)


def test_how_a_process_ended_may_be_unknown() -> None:
    assert evidence.read_exit(-1, None) == (None, None, None)
    assert evidence.read_exit(-1, os.getpid()) == (os.getpid(), None, None)


def test_a_pid_that_is_gone_leads_nowhere() -> None:
    assert evidence.open_by_pid(2**22 - 1) == -1
    assert evidence.start_time(2**22 - 1) is None
    pidfd = evidence.open_by_pid(os.getpid())
    assert pidfd >= 0
    os.close(pidfd)


def test_a_pid_that_changed_hands_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1, 2])
    monkeypatch.setattr(evidence, "start_time", lambda pid: next(times))
    assert evidence.open_by_pid(os.getpid()) == -1
