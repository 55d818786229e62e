"""Packets over the tether that somebody could send: mutated offers, with descriptors of every kind beside them."""

import array
import asyncio
import fcntl
import os
import random
import select
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import msgpack

from lmlive.protocol.tether import MAX_FDS, MAX_PACKET_BYTES, Offer, Receipt, decode_answer
from lmlive.protocol.verbs import Role
from tests.end_to_end.peer import BLOCKS, register
from tests.fuzz.messages import Facts, hostile_msgpack
from tests.fuzz.subject import MODEL
from tests.server.raw import BLOCK_BYTES, memory_file

PATIENCE: Final = 10.0
MOST_BESIDE: Final = 253
"""The most descriptors that the kernel takes beside one packet."""


def unsealed(nbytes: int = BLOCK_BYTES) -> int:
    """Give a memory file that may still shrink."""
    fd = os.memfd_create("lmlive-test", os.MFD_CLOEXEC)
    os.truncate(fd, nbytes)
    return fd


def write_sealed() -> int:
    """Give a memory file that nobody may write."""
    fd = os.memfd_create("lmlive-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, BLOCK_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK)
    return fd


def pipe_end() -> int:
    """Give the reading end of a pipe."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def epoll() -> int:
    """Give an epoll."""
    made = select.epoll()
    fd = os.dup(made.fileno())
    made.close()
    return fd


def unix_socket() -> int:
    """Give one end of a socket pair whose other end is closed."""
    one, other = socket.socketpair()
    other.close()
    return one.detach()


OPENERS: Final[list[Callable[[], int]]] = [
    lambda: memory_file("lmlive-test", BLOCKS * BLOCK_BYTES),
    lambda: memory_file("lmlive-test", BLOCKS * BLOCK_BYTES),
    lambda: memory_file("lmlive-test", 1),
    lambda: memory_file("lmlive-test", 0),
    unsealed,
    write_sealed,
    pipe_end,
    epoll,
    unix_socket,
    lambda: os.eventfd(0),
    lambda: os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY),
    lambda: os.open("/tmp", os.O_PATH),
    lambda: os.open("/dev/zero", os.O_RDWR),
    lambda: os.open("/dev/null", os.O_RDONLY),
    lambda: os.open("/proc/self/maps", os.O_RDONLY),
    lambda: os.pidfd_open(os.getpid()),
]


class FuzzTie:
    """A tether's far end that keeps no manners; its packets depend on the seed alone."""

    def __init__(self, url: str, seed: int) -> None:
        self._path = f"{url.removeprefix('ipc://')}.tether"
        self._seed = seed
        self._number = 0
        self._sock: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what stands."""
        self.rest()

    def rest(self) -> None:
        """Leave, for the time being."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    async def offer_memory(self, facts: Facts) -> list[object]:
        """Send good memory; give the REGISTER that names it."""
        self.rest()  # a tether speaks for one worker
        fd = memory_file("lmlive-test", BLOCKS * BLOCK_BYTES)
        try:
            packet = Offer(facts.secret, facts.instance_id, Role.WORKER, 0, 1).encode()
            answer = await self._exchange(packet, [fd])
        finally:
            os.close(fd)
        assert isinstance(answer, bytes), answer
        assert isinstance(decode_answer(answer), Receipt), decode_answer(answer)
        return register(facts.secret, model=MODEL)

    async def send(self, count: int) -> int:
        """Send so many packets, each of which gets one answer, or the end of its tether; give how many were sent."""
        for _ in range(count):
            self._number += 1
            rng = random.Random(f"{self._seed}/tether/{self._number}")  # noqa: S311 - a seed that repeats, no secret
            packet, fds = self._make(rng)
            try:
                answer = await self._exchange(packet, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            if answer:
                decode_answer(answer)
            else:
                self.rest()
            if rng.random() < 0.1:
                self.rest()
        return count

    def _make(self, rng: random.Random) -> tuple[bytes, list[int]]:
        many = rng.choice([0, 1, 1, 1, 2, 3, MAX_FDS, MAX_FDS + 1, MOST_BESIDE]) if rng.random() < 0.3 else 1
        if many > 3:
            one = rng.choice(OPENERS)()
            fds = [one, *(os.dup(one) for _ in range(many - 1))]
        else:
            fds = [rng.choice(OPENERS)() for _ in range(many)]
        offer = [
            rng.choice([b"f" * 16, b"g" * 16, rng.randbytes(16)]),
            rng.choice([0, 11, 12, 2**64 - 1]),
            rng.choice([1, 1, 1, 2, 3]),
            rng.choice([0, 0, 0, 1, len(fds), 4095]),
            len(fds) if rng.random() < 0.8 else rng.choice([0, 1, 64, 65]),
        ]
        packet = bytearray(msgpack.packb(offer))
        match rng.randrange(8):
            case 0:
                packet[rng.randrange(len(packet))] ^= 1 << rng.randrange(8)
            case 1:
                del packet[rng.randrange(1, len(packet)) :]
            case 2:
                packet += rng.randbytes(rng.randrange(1, 20))
            case 3:
                packet = bytearray(hostile_msgpack(rng) or b"\xc1")
            case 4:
                packet = bytearray(rng.randbytes(rng.choice([1, 40, 1000, MAX_PACKET_BYTES])))
        return bytes(packet), fds

    async def _exchange(self, packet: bytes, fds: list[int]) -> bytes:
        """Send a packet and wait for its one answer; nothing where the tether ended."""
        sock = self._sock
        if sock is None:
            sock = self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            sock.connect(self._path)
            greeting = await self._receive(sock)
            assert greeting, "no greeting"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sock.sendmsg([packet], rights)
            return await self._receive(sock)
        except (BrokenPipeError, ConnectionResetError):
            return b""

    async def _receive(self, sock: socket.socket) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.get_running_loop().sock_recv(sock, MAX_PACKET_BYTES)
