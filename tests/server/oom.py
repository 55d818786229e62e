"""A cgroup with little memory, where the machine lets tests make one."""

import os
from pathlib import Path

import pytest

from lmlive.server.cgroups import Cgroups

LIMIT = 24 << 20


class MemoryLimit:
    """A cgroup; a process enters it by writing its number to ``procs``.

    Args:
        path: Its directory.
        setting: The file that limits its memory.
    """

    def __init__(self, path: Path, setting: str) -> None:
        self.path = path
        path.mkdir()
        try:
            (path / setting).write_text(str(LIMIT))
        except OSError:
            path.rmdir()
            raise

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    def close(self) -> bool:
        """Remove it; False while a process in it is not quite gone."""
        try:
            self.path.rmdir()
        except OSError:
            return False
        return True


def make_memory_limit() -> MemoryLimit:
    """Make one, or skip the test and say why."""
    files = Cgroups()._files(os.getpid())
    if not files:
        pytest.skip("this machine shows no memory cgroup of ours")
    ours = Path(files[0]).parent
    setting = "memory.max" if "events" in files[0] else "memory.limit_in_bytes"
    try:
        return MemoryLimit(ours / f"lmlive-test-{os.getpid()}", setting)
    except OSError as error:
        pytest.skip(f"no cgroup can be made in {ours}: {error}")
