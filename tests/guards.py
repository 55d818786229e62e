"""What a test must give back: file descriptors, threads, child processes, shared memory, memfd mappings, tasks.

A ``Held`` is what this process holds at one moment. The fixtures of ``conftest.py`` take one before each test and
compare it with another one after it. What ends by itself (a thread on its way out, memory that waits for the garbage
collector) gets a short grace; only then is it a leak.
"""

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

GRACE = 2.0
STEP = 0.005
# The lane whose threads may hang in a driver for ever; a test that hangs one on purpose says so by its marker.
RELEASE_THREADS = "lmlive-release"


class Held(NamedTuple):
    """What this process holds; each key tells one thing from another, each value describes it."""

    fds: dict[object, str]
    threads: dict[object, str]
    children: dict[object, str]
    shm: dict[object, str]
    memfds: dict[object, str]


def held() -> Held:
    """Look at this process now."""
    return Held(_fds(), _threads(), _children(), _shm(), _memfds())


def leaks(before: Held, *, stuck_release: bool = False) -> list[str]:
    """Name what is held now and was not before, after a grace for what is ending."""
    found = _new(before, stuck_release=stuck_release)
    if not found:
        return []
    end = time.monotonic() + GRACE
    while found and time.monotonic() < end:
        gc.collect()
        time.sleep(STEP)
        found = _new(before, stuck_release=stuck_release)
    return found


async def leaked_tasks(before: Iterable[asyncio.Task[object]]) -> list[str]:
    """Name the tasks of the running loop that were not there before and do not end by themselves."""
    mine = {asyncio.current_task(), *before}

    def extra() -> list[asyncio.Task[object]]:
        return [task for task in asyncio.all_tasks() if task not in mine]

    end = time.monotonic() + GRACE / 4
    while extra() and time.monotonic() < end:  # noqa: ASYNC110  # tasks of code under test tell nobody when they end
        await asyncio.sleep(STEP)
    return [f"task {task!r}" for task in extra()]


def _new(before: Held, *, stuck_release: bool) -> list[str]:
    now = held()
    found = []
    for kind, old, new in zip(Held._fields, before, now, strict=True):
        for key, text in new.items():
            if key in old:
                continue
            if kind == "threads" and stuck_release and text.startswith(RELEASE_THREADS):
                continue
            if kind == "shm" and _held_by_others(text):
                continue
            found.append(f"{kind}: {text}")
    return found


def _fds() -> dict[object, str]:
    tracker = _tracker_fd()
    found: dict[object, str] = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            target = str(entry.readlink())
        except OSError:  # the directory's own descriptor, already closed
            continue
        if int(entry.name) != tracker:
            found[int(entry.name), target] = f"{entry.name} -> {target}"
    return found


def _threads() -> dict[object, str]:
    # The objects are the keys: thread idents are used again.
    return {thread: f"{thread.name}{' (daemon)' if thread.daemon else ''}" for thread in threading.enumerate()}


def _children() -> dict[object, str]:
    found: dict[object, str] = {}
    for task in list(Path("/proc/self/task").iterdir()):
        for pid in _read(task / "children").split():
            command = _read(Path("/proc", pid, "cmdline")).replace("\0", " ").strip()
            if "resource_tracker" not in command:
                found[int(pid)] = f"process {pid} {command or '(ended, not waited for)'}"
    return found


def _shm() -> dict[object, str]:
    return {entry.name: entry.name for entry in Path("/dev/shm").iterdir()}


def _memfds() -> dict[object, str]:
    return {line: line for line in _read(Path("/proc/self/maps")).splitlines() if "memfd:" in line}


def _held_by_others(name: str) -> bool:
    """Tell whether a live process that is none of ours uses this shared memory."""
    ours = {os.getpid(), *(pid for pid in _children() if isinstance(pid, int))}
    others = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) not in ours)
    return any(f"/dev/shm/{name}" in _read(entry / "maps") for entry in others)


def _tracker_fd() -> int | None:
    """Give the pipe of multiprocessing's resource tracker, which lives as long as the process."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    fd = getattr(tracker, "_fd", None)
    return fd if isinstance(fd, int) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def describe(condition: Callable[[], object]) -> str:
    """Name a condition for a failure's message."""
    code = getattr(condition, "__code__", None)
    if code is None:
        return repr(condition)
    return f"{condition.__qualname__} at {Path(code.co_filename).name}:{code.co_firstlineno}"
