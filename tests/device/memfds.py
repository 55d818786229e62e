"""Memory files for the device tests, and what the kernel says of this process's mappings."""

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmlive.device import syscalls
from lmlive.device.backend import BlockIds, Bytes, Chunk, FdSource, GroupPlace, MayContinue, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend

UID = os.geteuid()


def sealed_source(content: Bytes, name: str = "lmlive-test") -> FdSource:
    """Give a sealed memfd with this content; whoever opens it closes it."""
    fd = syscalls.make_memfd(name, content.nbytes)
    os.pwrite(fd, content.tobytes(), 0)
    return FdSource(fd, content.nbytes, UID)


def unsealed_source(content: Bytes, name: str = "lmlive-test") -> FdSource:
    """Give a memfd that its owner may still shrink."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(fd, content.tobytes(), 0)
    return FdSource(fd, content.nbytes, UID)


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    """Give bytes that are not zero by chance."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def open_context(content: Bytes, groups: list[GroupPlace]) -> CacheContext:
    """Open a context over one sealed memfd."""
    return CacheContext.open(HostBackend(), [sealed_source(content)], groups)


def one_plane(num_blocks: int, run: int, *, offset: int = 0, stride: int | None = None) -> list[GroupPlace]:
    """Place a single plane on handle 0."""
    return [GroupPlace(num_blocks, (PlanePlace(0, offset, run if stride is None else stride, run),))]


def always() -> bool:
    """Go on."""
    return True


class Asked:
    """Goes on, and remembers what it was asked with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, *facts: int) -> bool:
        """Go on."""
        self.calls.append(facts)
        return True


def lingering_socket() -> tuple[int, socket.socket]:
    """Give a TCP socket whose last close waits for ten minutes, by its descriptor, and its far end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("2i", 1, 600))
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    return near.detach(), far


def mappings_of(name: str) -> list[str]:
    """Give the lines of our memory map that name a memfd."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"memfd:{name}" in line]


def open_fds() -> list[str]:
    """Give what our descriptors are."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(f"{entry.name} {entry.readlink()}")
        except OSError:  # the listing's own
            continue
    return sorted(found)


def gather(context: CacheContext, blocks: Sequence[BlockIds], out: Bytes, may_continue: MayContinue) -> bool:
    """Copy one chunk out; tell whether it is complete."""
    return context.gather_chunks([Chunk(blocks, out)], may_continue) == 1


def scatter(
    context: CacheContext,
    blocks: Sequence[BlockIds],
    source: Bytes,
    may_continue: MayContinue,
    skip: Sequence[int] = (),
) -> bool:
    """Copy one chunk in; tell whether it is complete."""
    return context.scatter_chunks([Chunk(blocks, source, skip)], may_continue) == 1
