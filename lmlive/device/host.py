"""The host device: workers' memory files, mapped and copied by numpy.

This is the real cross-process path without a GPU. A file is mapped only if it is memory: on tmpfs or hugetlbfs. A peer
that shrinks its file would end this process by SIGBUS, so a file is *trusted* only if it is sealed against shrinking;
any other is accepted from our own user alone, with every page present at the open and its size checked before each
slice of a copy. Lane threads only.
"""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lmlive.device import syscalls
from lmlive.device.backend import Chunk, FdSource, GroupPlace, Mapping, MayContinue, Placement
from lmlive.device.host_copy import HostGroup, Pace, check_plane, gather, scatter, view_plane
from lmlive.errors import HandleOpenError, InternalError, InvalidHandle


def inspect_fd(fd: int, nbytes: int) -> bool:
    """Check that a descriptor is memory of at least ``nbytes``; tell whether it is sealed against shrinking.

    Memory of huge pages counts as not sealed: a hole punched into it may leave no page to fault in again.

    Raises:
        InvalidHandle: It is not.
    """
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise InvalidHandle(
            "the descriptor is no memory file: send a memfd, or use lmlive.shared_empty", mode=facts.st_mode
        )
    magic = syscalls.filesystem_magic(fd)
    if magic not in {syscalls.TMPFS_MAGIC, syscalls.HUGETLBFS_MAGIC}:
        raise InvalidHandle(
            "the file does not live in memory: send a memfd, or use lmlive.shared_empty", filesystem=magic
        )
    if nbytes <= 0 or facts.st_size < nbytes:
        raise InvalidHandle(
            f"the memory has {facts.st_size} bytes and its layout needs {nbytes}", size=facts.st_size, needed=nbytes
        )
    return magic == syscalls.TMPFS_MAGIC and bool(syscalls.seals_of(fd) & syscalls.F_SEAL_SHRINK)


@dataclass(slots=True, eq=False)
class HostMapping:
    """A mapped memory file; the address is void once ``close_mapping`` ran.

    Args:
        address: Its first byte here.
        nbytes: How much is mapped.
        fd: Kept for size checks where the file is not sealed, else -1.
    """

    address: int
    nbytes: int
    fd: int = -1
    open: bool = True

    def check(self) -> None:
        """Refuse memory that its owner has shrunk.

        Raises:
            InvalidHandle: It is smaller than what is mapped.
        """
        if self.fd >= 0 and (size := os.fstat(self.fd).st_size) < self.nbytes:
            raise InvalidHandle(
                f"the worker shrank its memory from {self.nbytes} to {size} bytes: register again",
                size=size,
                needed=self.nbytes,
            )


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """A layout laid over mappings; ``unsealed`` are those to be checked before each slice."""

    groups: tuple[GroupPlace, ...]
    rows: tuple[HostGroup, ...]
    mappings: tuple[HostMapping, ...]
    unsealed: tuple[HostMapping, ...]


class HostBackend:
    """Maps and copies memory files; stateless, so any thread may use it.

    Args:
        uid: Our user id: unsealed memory is accepted from this user alone. None: that of this process.
    """

    device = "host"

    def __init__(self, uid: int | None = None) -> None:
        self._uid = os.geteuid() if uid is None else uid

    def open_handle(self, source: FdSource) -> HostMapping:
        """Check, map and prefault a memory file; the descriptor is closed or the mapping's own afterwards.

        Raises:
            InvalidHandle: No memory file, too small, not sealed and from another user, or without all its pages.
            HandleOpenError: The system refuses the mapping.
        """
        kept = False
        try:
            sealed = inspect_fd(source.fd, source.nbytes)
            if not sealed and source.uid != self._uid:
                raise InvalidHandle(
                    f"memory of uid {source.uid} is not sealed, and we are uid {self._uid}: use lmlive.shared_empty",
                    uid=source.uid,
                    server_uid=self._uid,
                )
            mapping = self._map(source, sealed=sealed)
            kept = not sealed
            return mapping
        finally:
            if not kept:
                os.close(source.fd)

    def close_mapping(self, mapping: Mapping) -> None:
        """Unmap, once; the address is given up even where the system reports a failure."""
        mapping = _own(mapping)
        if not mapping.open:
            raise InternalError("a mapping was closed twice")
        mapping.open = False
        try:
            syscalls.unmap(mapping.address, mapping.nbytes)
        finally:
            if mapping.fd >= 0:
                os.close(mapping.fd)

    def place(self, mappings: Sequence[Mapping], groups: Sequence[GroupPlace]) -> HostPlacement:
        """Lay rows over the mappings; see ``DeviceBackend``."""
        own = tuple(_own(mapping) for mapping in mappings)
        rows = []
        for group in groups:
            planes = []
            for handle, offset, stride, run in group.planes:
                if not 0 <= handle < len(own):
                    raise InvalidHandle(f"there is no handle {handle}", handle=handle, handles=len(own))
                needed = check_plane(offset, stride, run, group.num_blocks)
                if needed > own[handle].nbytes:
                    raise InvalidHandle(
                        f"handle {handle} has {own[handle].nbytes} bytes and its layout needs {needed}",
                        handle=handle,
                        size=own[handle].nbytes,
                        needed=needed,
                    )
                memory = syscalls.view_of(own[handle].address + offset, needed - offset).view(np.int64)
                planes.append(view_plane(memory, stride, run, group.num_blocks))
            rows.append(HostGroup(group.num_blocks, tuple(planes), sum(plane.words for plane in planes)))
        unsealed = tuple(mapping for mapping in own if mapping.fd >= 0)
        return HostPlacement(tuple(groups), tuple(rows), own, unsealed)

    def gather(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk out of the worker's memory; see ``DeviceBackend``."""
        placed = cast("HostPlacement", placement)
        return gather(placed.rows, chunk, Pace(_checking(placed, may_continue)))

    def scatter(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk into the worker's memory; see ``DeviceBackend``."""
        placed = cast("HostPlacement", placement)
        return scatter(placed.rows, chunk, Pace(_checking(placed, may_continue)))

    def fence(self, placement: Placement) -> None:
        """Return at once: a copy here ends with the call that makes it."""

    def _map(self, source: FdSource, *, sealed: bool) -> HostMapping:
        try:
            address = syscalls.map_shared(source.fd, source.nbytes)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EPERM}:
                raise InvalidHandle(
                    "the memory cannot be written: send it without write seals", errno=error.errno
                ) from error
            raise HandleOpenError(f"the memory could not be mapped: {error}", errno=error.errno) from error
        try:
            _prefault(source.fd, address, source.nbytes, sealed=sealed)
        except BaseException:
            syscalls.unmap(address, source.nbytes)
            raise
        return HostMapping(address, source.nbytes, -1 if sealed else source.fd)


def _prefault(fd: int, address: int, nbytes: int, *, sealed: bool) -> None:
    """Fault in what is there, so that no request pays for it.

    Holes of a sealed memfd stay holes: they can always be faulted in later, and filling them here would charge the
    worker's memory to us. A hole of any other file may be one that its file system has no room for; touching it would
    end this process, so such a file must have all its pages now.

    Raises:
        InvalidHandle: It has not.
    """
    if not sealed and (present := os.fstat(fd).st_blocks * 512) < nbytes:
        raise InvalidHandle(
            "unsealed memory has holes: touch all of it before it is registered, or use lmlive.shared_empty",
            size=present,
            needed=nbytes,
        )
    ranges = syscalls.written_ranges(fd, nbytes) if sealed else iter([(0, nbytes)])
    try:
        for start, stop in ranges:
            if not syscalls.populate(address, start, stop, allocate=False):
                return
    except OSError as error:
        raise InvalidHandle(f"the memory's pages cannot be had: {error}", errno=error.errno) from error


def _checking(placement: HostPlacement, may_continue: MayContinue) -> MayContinue:
    """Check the size of unsealed memory before each slice."""
    if not placement.unsealed:
        return may_continue

    def check_and_ask() -> bool:
        for mapping in placement.unsealed:
            mapping.check()
        return may_continue()

    return check_and_ask


def _own(mapping: Mapping) -> HostMapping:
    if not isinstance(mapping, HostMapping):
        raise InternalError("a mapping of another device came to the host device", mapping=type(mapping).__name__)
    return mapping
