"""The few system calls that move or describe memory, made so that none of them holds the GIL.

``mmap.madvise`` and slices of ``mmap`` and ``memoryview`` hold the GIL for as long as they run; a call through
``ctypes.CDLL`` does not. A mapping made here is a bare address: it ends by ``unmap`` and by nothing else, so that no
forgotten array keeps it alive and no array may be used after it. Any thread.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = mmap.PAGESIZE
STEP_BYTES = 64 << 20
"""How much one prefault or allocation call may touch: tens of milliseconds."""

MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23

F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_WRITE = 0x8
F_SEAL_FUTURE_WRITE = 0x10
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_MFD_HUGETLB = 0x4
_MFD_HUGE_2MB = 21 << 26

TMPFS_MAGIC = 0x01021994
HUGETLBFS_MAGIC = 0x958458F6

_LINGER_OFF = struct.pack("2i", 0, 0)

_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_libc.setsockopt.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint)


def _raise(call: str) -> None:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")


def make_memfd(name: str, nbytes: int, *, huge: bool = False) -> int:
    """Make a memfd of exactly ``nbytes`` that nobody can shrink, grow or unseal; it has no name in any directory."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (_MFD_HUGETLB | _MFD_HUGE_2MB if huge else 0)
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def seals_of(fd: int) -> int:
    """Give the seals of a memory file; the one question that nobody but the kernel answers, so that it never waits.

    Raises:
        OSError: The file is neither on tmpfs nor on hugetlbfs.
    """
    return fcntl.fcntl(fd, _F_GET_SEALS)


def filesystem_magic(fd: int) -> int:
    """Give the magic number of the file system that holds the file."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes; its first word is f_type
    if _libc.fstatfs(fd, buffer) != 0:
        _raise("fstatfs")
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], "little") & 0xFFFFFFFF


def reopen(fd: int) -> int:
    """Open a file again for reading and writing, with a file description of our own.

    What a peer sent shares its flags with the peer, who may set them at any time: by O_APPEND each write would go to
    the end of the file. O_NONBLOCK: a lease that somebody holds on the file is an error, not a wait; on memory files it
    means nothing else.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)


def close_foreign(fd: int) -> None:
    """Close a descriptor that somebody else sent, whatever it is; never raises.

    The last close of a socket with SO_LINGER waits for its far end: it is told not to. Nothing else is asked about the
    descriptor before: a file system of a peer's own could let that wait. It can let the close itself wait as well, so
    that this is nothing for an event loop.
    """
    _libc.setsockopt(fd, socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_OFF, len(_LINGER_OFF))  # only sockets take it
    with contextlib.suppress(OSError):
        os.close(fd)


def map_shared(fd: int, nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    """Map the first ``nbytes`` of a file, left out of core dumps; give the address."""
    address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        _raise("mmap")
    _libc.madvise(address, nbytes, MADV_DONTDUMP)
    return int(address)


def unmap(address: int, nbytes: int) -> None:
    """End a mapping; every array over it is invalid from here on."""
    if _libc.munmap(address, nbytes) != 0:
        _raise("munmap")


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise; give 0 or the error number."""
    return ctypes.get_errno() if _libc.madvise(address, nbytes, advice) != 0 else 0


def steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut a range of bytes into pieces that one system call may touch."""
    for begin in range(start, stop, STEP_BYTES):
        yield begin, min(begin + STEP_BYTES, stop)


def populate(address: int, start: int, stop: int, *, allocate: bool) -> bool:
    """Prefault pages of a mapping, step by step.

    Args:
        address: The mapping's first byte.
        start: First byte of the range, on a page boundary.
        stop: End of the range.
        allocate: Fault for writing; without it pages are faulted for reading, which is three times cheaper for pages
            that exist already, and a later write to shared memory does not fault again.

    Returns:
        False where the kernel (before 5.14) does not know the advice; nothing was touched then.

    Raises:
        OSError: The pages cannot be had; without this call the first touch of them would end the process.
    """
    advice = MADV_POPULATE_WRITE if allocate else MADV_POPULATE_READ
    for begin, end in steps(start, stop):
        number = advise(address + begin, end - begin, advice)
        while number in {errno.EAGAIN, errno.EINTR}:
            number = advise(address + begin, end - begin, advice)
        if number == errno.EINVAL:
            return False
        if number:
            raise OSError(number, f"madvise: {os.strerror(number)}")
    return True


def written_ranges(fd: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Give the page ranges of a memory file that hold pages; holes are left out, and stay holes."""
    position = 0
    while position < nbytes:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
            position = min(os.lseek(fd, start, os.SEEK_HOLE), nbytes)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        if start < position:
            yield start, position


def resident_bytes(address: int, nbytes: int) -> int:
    """Count the bytes of a mapped memory file that have pages, whoever touched them; a millisecond for some GiB."""
    found = 0
    for begin, end in steps(0, nbytes):
        pages = np.empty(-(-(end - begin) // PAGE_BYTES), np.uint8)
        if _libc.mincore(address + begin, end - begin, pages.ctypes.data) != 0:
            _raise("mincore")
        found += int(np.count_nonzero(pages & 1)) * PAGE_BYTES
    return min(found, nbytes)


def address_space() -> int:
    """Give the bytes of address space that this process has, by the place of what is mapped at its top."""
    top = ctypes.cast(_libc.mmap, ctypes.c_void_p).value or 0
    return 1 << top.bit_length()


def view_of(address: int, nbytes: int) -> Bytes:
    """Give the bytes at an address as an array that owns nothing and keeps nothing alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


Progress = Callable[[int], bool]
"""Told the bytes done after each step; False ends the work early."""
