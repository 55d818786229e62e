"""The host device: workers' memory files, mapped and copied by numpy, or copied by reads and writes.

This is the real cross-process path without a GPU. Only memory is taken: files on tmpfs. A peer that shrinks its file
would end this process by SIGBUS if it were mapped, and no check before a copy can prevent that. So a file is mapped
only if it is sealed against shrinking; any other is accepted from our own user alone, and only its descriptor is kept:
see ``host_file.py``.

A page of a memory file is charged to whoever touches it first, and our copies touch what their worker never did. So the
pages that are missing in all workers' files together must fit into the memory that is available to us. Lane threads
only.
"""

import fcntl
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from lmlive.device import syscalls
from lmlive.device.backend import Chunk, FdSource, GroupPlace, Mapping, MayContinue, Placement
from lmlive.device.host_copy import HostGroup, HostPlane, Pace, check_plane, gather, map_plane, scatter
from lmlive.device.host_file import FilePlane, MemoryFile
from lmlive.device.limits import RETRY_AFTER, HostLimits, process_limits
from lmlive.device.pool import read_available_memory
from lmlive.errors import HandleOpenError, InternalError, InvalidHandle, ServerBusy

_BLOCK_BYTES = 512  # of st_blocks


def inspect_fd(fd: int, nbytes: int) -> bool:
    """Check that a descriptor is memory of at least ``nbytes``; tell whether it is sealed against shrinking.

    Memory of huge pages is refused: a hole punched into it may leave no page to fault in again, so that it cannot be
    mapped, and it cannot be written otherwise.

    Raises:
        InvalidHandle: It is not.
    """
    try:
        seals = syscalls.seals_of(fd)
    except OSError as error:
        detail = "the descriptor is no memory file: send a memfd, or use lmlive.shared_empty"
        raise InvalidHandle(detail, errno=error.errno) from error
    if syscalls.filesystem_magic(fd) != syscalls.TMPFS_MAGIC:
        raise InvalidHandle("memory of huge pages cannot be shared: send a memfd without, or use lmlive.shared_empty")
    read_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR
    if read_only or seals & (syscalls.F_SEAL_WRITE | syscalls.F_SEAL_FUTURE_WRITE):
        raise InvalidHandle("the memory cannot be written: send it without write seals, opened for both", seals=seals)
    size = os.fstat(fd).st_size  # after the seals: only then it cannot shrink any more
    if nbytes <= 0 or size < nbytes:
        raise InvalidHandle(f"the memory has {size} bytes and its layout needs {nbytes}", size=size, needed=nbytes)
    return bool(seals & syscalls.F_SEAL_SHRINK)


@dataclass(slots=True, eq=False)
class HostMapping:
    """An opened memory file: mapped, or by its descriptor; neither may be used once ``close_mapping`` ran.

    Args:
        address: Its first byte here; 0 if it is not mapped.
        nbytes: How much of it is borrowed.
        file: The file where it is not sealed, hence not mapped.
        missing: Bytes without pages when it was opened, which our copies may fill.
    """

    address: int
    nbytes: int
    file: MemoryFile | None = None
    missing: int = 0
    open: bool = True


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """A layout laid over opened memory."""

    groups: tuple[GroupPlace, ...]
    rows: tuple[HostGroup, ...]
    mappings: tuple[HostMapping, ...]


class HostBackend:
    """Opens and copies memory files; any thread may use it.

    Args:
        uid: Our user id: unsealed memory is accepted from this user alone. None: that of this process.
        limits: How much of this process the memory of workers may take. None: the shares of this process.
    """

    device = "host"

    def __init__(self, uid: int | None = None, limits: HostLimits | None = None) -> None:
        self._uid = os.geteuid() if uid is None else uid
        self._limits = limits or process_limits()
        self._lock = threading.Lock()
        self._opened: set[HostMapping] = set()

    def open_handle(self, source: FdSource) -> HostMapping:
        """Check a memory file and map it, or open it again where it is not sealed; the descriptor is closed.

        Raises:
            InvalidHandle: No memory file, too small, too large to map, or not sealed and from another user.
            ServerBusy: Workers' memory takes too much of this process already.
            HandleOpenError: The system refuses.
        """
        try:
            if inspect_fd(source.fd, source.nbytes):
                return self._keep_in_mind(self._map(source, self._missing(source)))
            if source.uid != self._uid:
                raise InvalidHandle(
                    f"memory of uid {source.uid} is not sealed, and we are uid {self._uid}: use lmlive.shared_empty",
                    uid=source.uid,
                    server_uid=self._uid,
                )
            return self._keep_in_mind(self._keep(source, self._missing(source)))
        finally:
            syscalls.close_foreign(source.fd)

    def close_mapping(self, mapping: Mapping) -> None:
        """Unmap or close, once; it is given up even where the system reports a failure."""
        mapping = _own(mapping)
        if not mapping.open:
            raise InternalError("a mapping was closed twice")
        mapping.open = False
        with self._lock:
            self._opened.discard(mapping)
        if mapping.file is not None:
            os.close(mapping.file.fd)
            self._limits.descriptors.give_back()
            return
        syscalls.unmap(mapping.address, mapping.nbytes)
        self._return_mapping(mapping.nbytes)

    def place(self, mappings: Sequence[Mapping], groups: Sequence[GroupPlace]) -> HostPlacement:
        """Lay planes over the opened memory; see ``DeviceBackend``."""
        own = tuple(_own(mapping) for mapping in mappings)
        rows = []
        for group in groups:
            planes: list[HostPlane] = []
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
                file = own[handle].file
                if file is not None:
                    planes.append(FilePlane(file, offset, stride, run))
                    continue
                memory = syscalls.view_of(own[handle].address + offset, needed - offset).view(np.int64)
                planes.append(map_plane(memory, stride, run, group.num_blocks))
            rows.append(HostGroup(group.num_blocks, tuple(planes), sum(plane.words for plane in planes)))
        return HostPlacement(tuple(groups), tuple(rows), own)

    def gather(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk out of the worker's memory; see ``DeviceBackend``."""
        return gather(cast("HostPlacement", placement).rows, chunk, Pace(may_continue))

    def scatter(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk into the worker's memory; see ``DeviceBackend``."""
        return scatter(cast("HostPlacement", placement).rows, chunk, Pace(may_continue))

    def fence(self, placement: Placement) -> None:
        """Return at once: a copy here ends with the call that makes it."""

    def _keep_in_mind(self, mapping: HostMapping) -> HostMapping:
        with self._lock:
            self._opened.add(mapping)
        return mapping

    def _missing(self, source: FdSource) -> int:
        """Give the bytes without pages, which our copies would fill at our cost.

        Raises:
            ServerBusy: They are more than there is memory for.
        """
        missing = max(0, source.nbytes - os.fstat(source.fd).st_blocks * _BLOCK_BYTES)
        if not missing:
            return 0
        available = read_available_memory() * 4 // 5
        with self._lock:
            opened = tuple(self._opened)
            if missing + sum(mapping.missing for mapping in opened) > available:  # some were filled meanwhile
                for mapping in opened:
                    mapping.missing = _still_missing(mapping)
            others = sum(mapping.missing for mapping in opened)
        if missing + others > available:
            raise ServerBusy(
                f"{missing} bytes of this memory have no pages, and copies would fill them at the server's cost, which "
                f"has {available} left for that and owes {others}: write to it first",
                retry_after=RETRY_AFTER,
                missing=missing,
                available=available,
                owed=others,
            )
        return missing

    def _map(self, source: FdSource, missing: int) -> HostMapping:
        limits, nbytes = self._limits, source.nbytes
        if nbytes > limits.handle_bytes:
            raise InvalidHandle(
                f"{nbytes} bytes are more than one handle may map, which is {limits.handle_bytes}: send smaller ones",
                size=nbytes,
                limit=limits.handle_bytes,
            )
        limits.mappings.take()
        try:
            limits.addresses.take(nbytes)
        except BaseException:
            limits.mappings.give_back()
            raise
        try:
            address = syscalls.map_shared(source.fd, nbytes)
        except OSError as error:
            self._return_mapping(nbytes)
            raise HandleOpenError(f"the memory could not be mapped: {error}", errno=error.errno) from error
        mapping = HostMapping(address, nbytes, missing=missing)
        try:
            _prefault(source.fd, address, nbytes)
        except BaseException:
            self.close_mapping(mapping)
            raise
        return mapping

    def _return_mapping(self, nbytes: int) -> None:
        self._limits.mappings.give_back()
        self._limits.addresses.give_back(nbytes)

    def _keep(self, source: FdSource, missing: int) -> HostMapping:
        self._limits.descriptors.take()
        try:
            fd = syscalls.reopen(source.fd)
        except OSError as error:
            self._limits.descriptors.give_back()
            raise HandleOpenError(f"the memory could not be opened again: {error}", errno=error.errno) from error
        return HostMapping(0, source.nbytes, MemoryFile(fd, source.nbytes), missing)


def _still_missing(mapping: HostMapping) -> int:
    if not mapping.missing:
        return 0
    if mapping.file is not None:
        return max(0, mapping.nbytes - os.fstat(mapping.file.fd).st_blocks * _BLOCK_BYTES)
    resident = syscalls.resident_bytes(mapping.address, mapping.nbytes)  # but for those that were only set aside
    return min(mapping.missing, mapping.nbytes - resident)


def _prefault(fd: int, address: int, nbytes: int) -> None:
    """Fault in what is there, so that no request pays for it.

    Holes stay holes: a sealed memfd's can always be faulted in later, and filling them here would charge the worker's
    memory to us.

    Raises:
        InvalidHandle: Its pages cannot be had.
    """
    try:
        for start, stop in syscalls.written_ranges(fd, nbytes):
            if not syscalls.populate(address, start, stop, allocate=False):
                return
    except OSError as error:
        raise InvalidHandle(f"the memory's pages cannot be had: {error}", errno=error.errno) from error


def _own(mapping: Mapping) -> HostMapping:
    if not isinstance(mapping, HostMapping):
        raise InternalError("a mapping of another device came to the host device", mapping=type(mapping).__name__)
    return mapping
