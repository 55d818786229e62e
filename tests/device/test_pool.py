import errno
import os
import threading
from pathlib import Path

import pytest

from lmlive.device import pool, syscalls
from lmlive.device.pool import GroupMemory, PoolMemory, available_memory, read_available_memory
from lmlive.errors import InternalError, InvalidHandle, StartError
from tests.device.memfds import Asked, mappings_of, open_fds

MIB = 1 << 20
MEMINFO = "MemTotal:       2048 kB\nMemFree:        100 kB\nMemAvailable:   1024 kB\nSwapFree: 9 kB\n"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((), 1024 * 1024),
        ((GroupMemory("max\n", "5\n", ""),), 1024 * 1024),
        ((GroupMemory("9223372036854771712\n", "5\n", ""),), 1024 * 1024),
        ((GroupMemory("500000\n", "200000\n", "anon 1\ninactive_file 50000\n"),), 350000),
        ((GroupMemory("500000\n", "200000\n", "inactive_file 1\ntotal_inactive_file 100000\n"),), 400000),
        ((GroupMemory("500000\n", "1\n", ""), GroupMemory("400000\n", "100000\n", "")), 300000),
        ((GroupMemory("500000\n", "600000\n", ""),), 0),
        ((GroupMemory("", "", ""),), 1024 * 1024),
        ((GroupMemory("500000\n", "", ""),), 500000),
    ],
)
def test_the_least_of_machine_and_control_groups_is_available(groups: tuple[GroupMemory, ...], expected: int) -> None:
    assert available_memory(MEMINFO, groups) == expected


def test_an_unreadable_machine_has_nothing() -> None:
    assert available_memory("", ()) == 0
    assert available_memory("MemAvailable:\n", ()) == 0


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "900\n", "a/memory.current": "100\n", "a/b/memory.max": "max\n"}, 800),
        ("0::/gone/elsewhere\n", {"memory.max": "500\n", "memory.current": "100\n"}, 400),
        (
            "5:cpu,cpuacct:/\n4:memory:/job\n0::/\n",
            {"memory/job/memory.limit_in_bytes": "700\n", "memory/job/memory.usage_in_bytes": "100\n"},
            600,
        ),
        ("", {}, 1024 * 1024),
    ],
)
def test_our_control_groups_are_read_up_to_the_root(
    cgroup: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(pool, "_CGROUP", tmp_path)
    assert available_memory(MEMINFO, tuple(pool._groups(cgroup))) == expected


def test_this_machine_has_memory() -> None:
    assert 0 < read_available_memory() < 1 << 50


def test_a_pool_is_a_sealed_memfd_and_goes_without_a_trace() -> None:
    fds = open_fds()
    memory = PoolMemory(3 * MIB + 4096)
    assert memory.view.nbytes == memory.nbytes == 3 * MIB + 4096
    seals = syscalls.seals_of(memory.fd)
    assert seals is not None
    assert seals & syscalls.F_SEAL_SHRINK
    assert len(mappings_of("lmlive-pool")) == 1
    memory.view[-1] = 7
    assert os.pread(memory.fd, 1, memory.nbytes - 1) == b"\x07"
    memory.close()
    memory.close()
    assert open_fds() == fds
    assert mappings_of("lmlive-pool") == []
    with pytest.raises(InternalError):
        _ = memory.view


def test_populate_allocates_everything_and_tells_each_step() -> None:
    memory = PoolMemory(130 * MIB)
    progress = Asked()
    assert memory.populate(progress)
    assert progress.calls == [(64 * MIB,), (128 * MIB,), (130 * MIB,)]
    assert os.fstat(memory.fd).st_blocks * 512 == 130 * MIB
    memory.close()


def test_populate_can_be_ended_early() -> None:
    memory = PoolMemory(130 * MIB)
    assert not memory.populate(lambda nbytes: False)
    assert os.fstat(memory.fd).st_blocks * 512 == 64 * MIB
    memory.close()
    assert not memory.populate()


def test_a_close_from_another_thread_ends_populate() -> None:
    memory = PoolMemory(192 * MIB)
    begun, closed = threading.Event(), threading.Event()
    finished: list[bool] = []

    def progress(nbytes: int) -> bool:
        begun.set()
        return closed.wait(10)

    thread = threading.Thread(target=lambda: finished.append(memory.populate(progress)))
    thread.start()
    assert begun.wait(10)
    memory.close()
    closed.set()
    thread.join()
    assert finished == [False]
    assert mappings_of("lmlive-pool") == []


def test_a_pool_over_four_fifths_is_refused_before_anything_is_made() -> None:
    fds = open_fds()
    PoolMemory(8 * MIB, available=10 * MIB).close()
    with pytest.raises(StartError) as caught:
        PoolMemory(8 * MIB + 1, available=10 * MIB)
    assert caught.value.message == (
        "pool_bytes: a pool of 8.1 MiB is over 80 % of the 10.0 MiB available (at most 8.0 MiB): set a smaller one"
    )
    assert caught.value.fields == {"asked": 8 * MIB + 1, "available": 10 * MIB, "rule": pool.RULE}
    with pytest.raises(StartError):
        PoolMemory(1 << 50)
    assert open_fds() == fds


@pytest.mark.parametrize(
    ("nbytes", "left", "asked"),
    [
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1023 B"),
        (1536, "1.5 KiB", "1.5 KiB"),
        ((1 << 30) - 1, "1023.9 MiB", "1024.0 MiB"),
        (21 << 30, "21.0 GiB", "21.0 GiB"),
        ((21 << 30) + 1, "21.0 GiB", "21.1 GiB"),
        (3000 << 40, "3000.0 TiB", "3000.0 TiB"),
    ],
)
def test_sizes_for_people_are_rounded_to_the_safe_side(nbytes: int, left: str, asked: str) -> None:
    assert pool._left(nbytes) == left
    assert pool._asked(nbytes) == asked


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_runs_out_is_a_failed_start(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PoolMemory(130 * MIB)
    real = os.posix_fallocate

    def run_out(fd: int, offset: int, nbytes: int) -> None:
        if offset:
            raise OSError(number, os.strerror(number))
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", run_out)
    with pytest.raises(StartError) as caught:
        memory.populate()
    assert caught.value.message == "pool_bytes: memory ran out after 64.0 MiB of 130.0 MiB: set a smaller one"
    assert caught.value.fields["available"] == 64 * MIB
    assert caught.value.fields["asked"] == 130 * MIB
    memory.close()


def test_a_mapping_that_is_refused_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    fds = open_fds()
    monkeypatch.setattr(syscalls, "map_shared", refuse)
    with pytest.raises(StartError, match=r"pool_bytes: a pool of 1\.0 MiB cannot be had .*Cannot allocate memory"):
        PoolMemory(MIB)
    assert open_fds() == fds


def test_huge_pages_that_are_gone_again_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    fds = open_fds()
    real = syscalls.map_shared

    def refuse_huge(fd: int, nbytes: int) -> int:
        if syscalls.filesystem_magic(fd) == syscalls.HUGETLBFS_MAGIC:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fd, nbytes)

    monkeypatch.setattr(pool, "_free_huge_bytes", lambda: 1 << 40)
    monkeypatch.setattr(syscalls, "map_shared", refuse_huge)
    memory = PoolMemory(3 * MIB)
    assert not memory.huge
    assert memory.view.nbytes == 3 * MIB
    memory.close()
    assert open_fds() == fds


def test_huge_pages_round_up_what_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = syscalls.make_memfd
    monkeypatch.setattr(pool, "_free_huge_bytes", lambda: 1 << 40)

    def make_small(name: str, nbytes: int, *, huge: bool) -> int:
        return real(name, nbytes)

    monkeypatch.setattr(syscalls, "make_memfd", make_small)
    memory = PoolMemory(3 * MIB, available=0)
    assert memory.huge
    assert memory.view.nbytes == 3 * MIB
    assert os.fstat(memory.fd).st_size == 4 * MIB
    progress = Asked()
    assert memory.populate(progress)
    assert progress.calls == [(3 * MIB,)]
    memory.close()
    assert mappings_of("lmlive-pool") == []


def test_a_pool_in_a_named_file_is_not_shared(tmp_path: Path) -> None:
    pool = PoolMemory(1 << 20, path=tmp_path / "pool")
    with pytest.raises(InvalidHandle):
        pool.share()
    pool.close()
