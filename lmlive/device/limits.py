"""How much of this process the memory of workers may take: descriptors, mappings, addresses.

Each of them runs out for the whole process: without descriptors no worker connects, without mappings or addresses no
thread starts. So workers get a share, and whoever comes when it is taken is told to come again. All devices of a
process draw on the same shares. It maps nothing. Any thread.
"""

import mmap
import resource
import threading
from pathlib import Path
from typing import NamedTuple

from lmlive.device import syscalls
from lmlive.errors import ServerBusy

RETRY_AFTER = 1.0

_OPEN = Path("/proc/self/fd")
_UNLIMITED_DESCRIPTORS = 1 << 20
_MAX_MAP_COUNT = 65530  # the kernel's default; some systems allow more, which only leaves more to the rest


def descriptors_in_use() -> int:
    """Count the descriptors that are open; that costs none. 3 us from Linux 6.2 on, a millisecond for 3,000 before."""
    return _OPEN.stat().st_size or sum(1 for _ in _OPEN.iterdir())


class Share:
    """An amount that is never exceeded.

    Args:
        of: What it is an amount of, for messages.
        limit: How much of it may be taken.
    """

    def __init__(self, of: str, limit: int) -> None:
        self.of = of
        self.limit = limit
        self._in_use = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """How much is taken."""
        return self._in_use

    def take(self, amount: int = 1) -> None:
        """Take some; whoever does gives it back.

        Raises:
            ServerBusy: There is not as much left; nothing was taken.
        """
        with self._lock:
            in_use = self._in_use
            if in_use + amount <= self.limit:
                self._in_use += amount
                return
        raise ServerBusy(
            f"the memory of other workers takes {in_use} of {self.limit} {self.of}: come again",
            retry_after=RETRY_AFTER,
            limit=self.limit,
            in_use=in_use,
        )

    def give_back(self, amount: int = 1) -> None:
        """Give back what was taken."""
        with self._lock:
            self._in_use -= amount


class HostLimits(NamedTuple):
    """The shares of workers' memory.

    Args:
        descriptors: One for each handle that is not mapped.
        mappings: One for each handle that is.
        addresses: Bytes mapped.
        handle_bytes: The most that one handle may map.
    """

    descriptors: Share
    mappings: Share
    addresses: Share
    handle_bytes: int


_DESCRIPTORS = Share("descriptors", 0)
_MAPPINGS = Share("mappings", _MAX_MAP_COUNT // 2)
_ADDRESSES = Share("bytes of address space", 0)


def process_limits() -> HostLimits:
    """Give the shares of this process, their limits as the system's are now.

    A quarter of the descriptors, since sockets need the others; half of the mappings; half of the addresses (64 TiB of
    the usual 47 bits), and a quarter of that for one handle: files without pages may claim any size.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    _DESCRIPTORS.limit = max(1, (_UNLIMITED_DESCRIPTORS if descriptors < 0 else descriptors) // 4)
    addresses, allowed = syscalls.address_space(), resource.getrlimit(resource.RLIMIT_AS)[0]
    addresses = max(mmap.PAGESIZE, (addresses if allowed < 0 else min(addresses, allowed)) // 2)
    _ADDRESSES.limit = addresses
    return HostLimits(_DESCRIPTORS, _MAPPINGS, _ADDRESSES, addresses // 4)
