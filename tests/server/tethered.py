"""A tether listener beside books, and what is at the far ends of its connections: packets, and processes."""

import array
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from lmlive.errors import LMLiveError
from lmlive.modules.management import hash_secret
from lmlive.modules.tethers import TetherRecord, close_all
from lmlive.protocol.tether import MAX_PACKET_BYTES, Greeting, Offer, PoolGrant, Receipt, decode_answer
from lmlive.protocol.verbs import Role
from lmlive.server.lanes import in_thread
from lmlive.server.rundir import RunDir
from lmlive.server.tether import Tethers
from tests.conftest import eventually
from tests.modules.registry import SECRET, Registry


class House:
    """A tether listener, and the far ends of its connections."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.registry = Registry(**settings)
        self.books = self.registry.books
        self.path = run_dir / "router.sock.tether"
        self._ends: list[socket.socket] = []
        self._run_dir = RunDir(run_dir)
        self.tethers = Tethers(self.books, close_all, self._drop_packet)

    async def open(self, most: int | None = None) -> Self:
        await in_thread(self._run_dir.open)
        self.tethers.take(await in_thread(lambda: self._run_dir.tether(self.path.with_suffix(""))))
        self.tethers.open(most or self.books.config.max_connections)
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

    def _drop_packet(self, sock: socket.socket, then: Callable[[], None]) -> None:
        sock.recv(1)
        asyncio.get_running_loop().call_soon(then)

    def record(self, secret: bytes = SECRET) -> TetherRecord | None:
        return self.books.tethers.get(hash_secret(secret))


async def receive(end: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(end, MAX_PACKET_BYTES), 5)


async def say(end: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> Receipt | PoolGrant | LMLiveError:
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


WORKER = """
import os, socket, time
PACKET = {packet!r}
{before}
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
end.connect({address!r})
end.recv(1000)
end.send(PACKET)
end.recv(1000)
{then}
print("ready", flush=True)
time.sleep(60)
"""


async def start(text: str, *command: str, stdin: bool = False) -> asyncio.subprocess.Process:
    """Start a process that runs this text; ``command`` stands before the interpreter's name."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, sys.executable, "-S", "-E", "-c", text, stdin=pipe if stdin else None, stdout=pipe
    )


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 10)).decode().strip()


async def worker(
    house: House, then: str = "", *, before: str = "", packet: bytes | None = None, stdin: bool = False
) -> asyncio.subprocess.Process:
    """Start a process that holds a tether, and wait until it says so."""
    text = WORKER.format(address=str(house.path), packet=packet or offer(), before=before, then=then)
    process = await start(text, stdin=stdin)
    assert await line_of(process) == "ready"
    return process


async def end_of(process: asyncio.subprocess.Process) -> None:
    """Kill it, and ask how it ended."""
    process.kill()
    await process.communicate()


def last_event(house: House) -> dict[str, object]:
    return house.books.events.after(0, 1000)[-1]


async def part(house: House, role: Role = Role.SCHEDULER, secret: bytes = SECRET) -> None:
    """Open a tether, and close it again."""
    end = await house.connect()
    await say(end, offer(instance_id=0 if role is Role.SCHEDULER else 7, role=role, secret=secret))
    end.close()
    await eventually(lambda: not house.books.tethers[hash_secret(secret)].open)
