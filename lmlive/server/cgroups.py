"""Where the kernel counts the processes that it killed for want of memory: in the cgroup of each.

Read by the kernel's own names alone: the pid that it gave, ``/proc``, and where the hierarchies are mounted. A cgroup
that cannot be seen from here, as another container's, has no counter.

Loop thread only; nothing here waits.
"""

import os
from functools import partial
from typing import Final, NamedTuple

from lmlive.server.exits import CountOomKills, read_kernel_file

_OCTAL: Final = frozenset("01234567")
_FILES_OF_V1: Final = ("memory.oom_control",)
_FILES_OF_V2: Final = ("memory.events.local", "memory.events")  # the latter counts the cgroups below it too


class _Hierarchy(NamedTuple):
    root: str  # what of it is mounted
    place: str  # where
    files: tuple[str, ...]


class Cgroups:
    """Finds the counters of OOM kills; the mounts are read once, at the first question.

    Args:
        proc: Where the kernel's own file system is.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._mounts: tuple[_Hierarchy | None, _Hierarchy | None] | None = None

    def find_counter(self, pid: int) -> CountOomKills:
        """Give what counts the OOM kills of the cgroup that a process is in now."""
        return partial(read_oom_kills, self._files(pid))

    def _files(self, pid: int) -> tuple[str, ...]:
        if self._mounts is None:
            self._mounts = _find_mounts(self._read("self/mountinfo"))
        for hierarchy, path in zip(self._mounts, _find_paths(self._read(f"{pid}/cgroup")), strict=True):
            # Where version 1 has the memory, version 2 has none.
            if hierarchy is not None and path is not None:
                return _join(hierarchy, path)
        return ()

    def _read(self, name: str) -> str:
        return read_kernel_file(f"{self._proc}/{name}").decode(errors="surrogateescape")


def read_oom_kills(files: tuple[str, ...]) -> int | None:
    """Give the count in the first of these files that has one; None if none has."""
    for file in files:
        for line in read_kernel_file(file).splitlines():
            words = line.split()
            if len(words) == 2 and words[0] == b"oom_kill" and words[1].isdigit():
                return int(words[1])
    return None


def _find_mounts(mountinfo: str) -> tuple[_Hierarchy | None, _Hierarchy | None]:
    """Find where the memory of version 1 and where version 2 is mounted."""
    first: _Hierarchy | None = None
    second: _Hierarchy | None = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, place = _plain(fields[3]), _plain(fields[4])
        if kind[0] == "cgroup2":
            second = second or _Hierarchy(root, place, _FILES_OF_V2)
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            first = first or _Hierarchy(root, place, _FILES_OF_V1)
    return first, second


def _find_paths(cgroup: str) -> tuple[str | None, str | None]:
    """Give a process's paths in the memory hierarchy of version 1, and in version 2."""
    first: str | None = None
    second: str | None = None
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            first = path
        elif number == "0" and not controllers:
            second = path
    return first, second


def _join(hierarchy: _Hierarchy, path: str) -> tuple[str, ...]:
    """Give the files of a cgroup; none where it lies outside of what is mounted here."""
    root = hierarchy.root.rstrip("/")
    if ".." in path.split("/") or not (path == root or path.startswith(f"{root}/")):
        return ()
    below = path[len(root) :].strip("/")
    return tuple(os.path.join(hierarchy.place, below, name) for name in hierarchy.files)  # noqa: PTH118 - no file system


def _plain(text: str) -> str:
    """Undo the kernel's escapes of white space: a backslash and three octal digits."""
    head, *parts = text.split("\\")
    return head + "".join(
        chr(int(part[:3], 8)) + part[3:] if len(part) >= 3 and set(part[:3]) <= _OCTAL else f"\\{part}"
        for part in parts
    )
