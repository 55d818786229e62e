"""Tests that leak, one of each kind; ``test_guards.py`` runs them in a pytest of their own and reads what it says."""

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lmlive
from tests import guards
from tests.conftest import eventually

guards.GRACE = 0.1
kept: list[object] = []


@pytest.fixture(scope="module", autouse=True)
def _give_back() -> Iterator[None]:
    yield
    for thing in kept:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        elif isinstance(thing, Path):
            thing.unlink()


def a_file_of_lmlive(source: str) -> Callable[[], None]:
    """Run code as if it stood in the package, where blocking calls are looked for."""
    names: dict[str, Callable[[], None]] = {}
    exec(compile(source, str(Path(lmlive.__file__).with_name("seeded.py")), "exec"), names)  # noqa: S102
    return names["call"]


def test_leaks_fd() -> None:
    kept.append(os.open("/dev/null", os.O_RDONLY))


def test_leaks_thread() -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True, name="lmlive-release-0").start()


@pytest.mark.stuck_release
def test_passes_with_a_marked_thread() -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True, name="lmlive-release-1").start()


def test_leaks_child() -> None:
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"]))


def test_leaks_memfd() -> None:
    fd = os.memfd_create("left")
    os.ftruncate(fd, 4096)
    kept.append(mmap.mmap(fd, 4096))
    os.close(fd)


def test_leaks_shm() -> None:
    path = Path(f"/dev/shm/lmlive-test-{os.getpid()}")
    path.touch()
    kept.append(path)


async def test_leaks_task() -> None:
    kept.append(asyncio.create_task(asyncio.sleep(30)))


async def test_leaks_exception() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    await asyncio.sleep(0)


@pytest.mark.loop_errors
async def test_passes_with_a_marked_exception() -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 // 0)
    await asyncio.sleep(0)


async def test_fails_blocking() -> None:
    a_file_of_lmlive("import time\ndef call():\n    time.sleep(0.001)\n")()


@pytest.mark.may_block
async def test_passes_where_it_may_block() -> None:
    a_file_of_lmlive("import time\ndef call():\n    time.sleep(0.001)\n")()


def test_fails_warning() -> None:
    warnings.warn("deprecated", DeprecationWarning, stacklevel=1)


async def test_fails_waiting() -> None:
    await eventually(lambda: False, within=0.01)


async def test_passes_waiting(run_dir: Path) -> None:
    found: list[int] = []
    asyncio.get_running_loop().call_later(0.01, found.append, 1)
    assert await eventually(lambda: found) == [1]

    async def ready() -> str:
        return "yes" if found else ""

    assert await eventually(ready) == "yes"
    with contextlib.closing(open(run_dir / "file", "w")):  # noqa: ASYNC230, PTH123
        pass


def test_passes_without_the_shells_settings(run_dir: Path) -> None:
    assert not [name for name in os.environ if name.startswith("LMLIVE_")]
    assert len(str(run_dir)) < 30
    assert run_dir.stat().st_mode & 0o777 == 0o700
