"""What the server knows of each tether: whose process it is, and the descriptors it sent.

A record lives under the hash of its secret. Its table holds the descriptors of the next REGISTER; they belong to the
table until they are taken or closed, and every one of them is closed exactly once. Only shared memory comes into a
table: whatever is asked of another file may wait for a disk, a network or a stranger's process. The identities of a
table outlive its descriptors, so that a repeated REGISTER is recognised without them.

Not the socket: that is ``lmlive.server.tether``. Loop thread only.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmlive.device.syscalls import close_foreign
from lmlive.errors import InvalidHandle
from lmlive.liveness.evidence import Evidence

Discard = Callable[[Sequence[int]], None]
"""Closes descriptors, which are its own from then on."""


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors, each of them; may take seconds, because the last one of a file frees its memory."""
    for fd in fds:
        close_foreign(fd)


def is_shared_memory(fd: int) -> bool:
    """Tell whether a descriptor is a memory file or a file of a tmpfs; asks the kernel alone, and never waits."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


@dataclass(slots=True, eq=False)
class Descriptor:
    """One received descriptor.

    Args:
        fd: The descriptor; -1 once it was taken or closed.
        device: ``st_dev``.
        inode: ``st_ino``.
        size: ``st_size``.
    """

    fd: int
    device: int
    inode: int
    size: int


@dataclass(slots=True, eq=False)
class Waiting:
    """The descriptors that wait in all tables together.

    Args:
        discard: Closes those that nobody asked for.
        count: How many there are.
    """

    discard: Discard
    count: int = 0


@dataclass(slots=True, eq=False)
class FdTable:
    """The descriptors that the next REGISTER of a secret may name.

    Args:
        waiting: Counts the descriptors of all tables.
        uid: The sender, as the kernel names it.
        received_at: Seconds, of the latest part.
        slots: By index.
    """

    waiting: Waiting
    uid: int = -1
    received_at: float = 0.0
    slots: list[Descriptor] = field(default_factory=list)

    @property
    def held(self) -> int:
        """How many descriptors it still owns."""
        return sum(slot.fd >= 0 for slot in self.slots)

    def add(self, fd: int) -> None:
        """Take in a descriptor of shared memory."""
        found = os.fstat(fd)
        self.slots.append(Descriptor(fd, found.st_dev, found.st_ino, found.st_size))
        self.waiting.count += 1

    def find(self, index: int) -> Descriptor:
        """Give one descriptor's record; InvalidHandle where the index is outside."""
        if not 0 <= index < len(self.slots):
            raise InvalidHandle("this descriptor was not sent over the tether", index=index, received=len(self.slots))
        return self.slots[index]

    def take(self, index: int) -> int:
        """Give one descriptor away; whoever takes it closes it."""
        slot = self.find(index)
        if slot.fd < 0:
            raise InvalidHandle("this descriptor served another REGISTER: send the table again", index=index)
        return self._let_go(slot)

    def close(self) -> None:
        """Give up what was not taken; the identities stay."""
        fds = [self._let_go(slot) for slot in self.slots if slot.fd >= 0]
        if fds:
            self.waiting.discard(fds)

    def _let_go(self, slot: Descriptor) -> int:
        fd, slot.fd = slot.fd, -1
        self.waiting.count -= 1
        return fd


@dataclass(slots=True, eq=False)
class TetherRecord:
    """One process that holds, or held, a tether.

    Args:
        secret_hash: SHA-256 of its secret.
        instance_id: Which instance it speaks for; 0 for a scheduler.
        role: 1 worker, 2 scheduler, 3 tool.
        evidence: Whether the kernel will tell of its exit.
        pid: As the kernel names it; None where it cannot.
        table: The descriptors it sent.
        open: Whether the socket stands.
        closed_at: Seconds, once it does not.
        has_pool: Whether the process was given the pool, and may copy by itself.
    """

    secret_hash: bytes
    instance_id: int
    role: int
    evidence: Evidence
    pid: int | None
    table: FdTable
    open: bool = True
    closed_at: float = 0.0
    has_pool: bool = False
