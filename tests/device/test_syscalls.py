import os
from pathlib import Path

import pytest

from lmlive.device import syscalls
from tests.device.memfds import open_fds

PAGE = syscalls.PAGE_BYTES


def test_a_mapping_is_shared_and_ends_when_told() -> None:
    fd = syscalls.make_memfd("lmlive-test", PAGE)
    address = syscalls.map_shared(fd, PAGE)
    syscalls.view_of(address, PAGE)[3] = 9
    assert os.pread(fd, 4, 0) == b"\0\0\0\x09"
    os.close(fd)
    assert syscalls.view_of(address, PAGE)[3] == 9
    syscalls.unmap(address, PAGE)


def test_a_mapping_stays_out_of_core_dumps() -> None:
    fd = syscalls.make_memfd("lmlive-test", PAGE)
    address = syscalls.map_shared(fd, PAGE)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    flags = next(line for line in lines[start:] if line.startswith("VmFlags:"))
    assert " dd " in f"{flags} "
    syscalls.unmap(address, PAGE)
    os.close(fd)


def test_failures_carry_their_number() -> None:
    with pytest.raises(OSError, match="mmap"):
        syscalls.map_shared(-1, PAGE)
    with pytest.raises(OSError, match="munmap"):
        syscalls.unmap(1, PAGE)
    with pytest.raises(OSError, match="fstatfs"):
        syscalls.filesystem_magic(-1)
    with pytest.raises(OSError, match="Bad file"):
        syscalls.seals_of(99999)
    with pytest.raises(OSError, match="madvise"):
        syscalls.populate(PAGE, 0, PAGE, allocate=True)


def test_a_memfd_that_cannot_have_its_size_is_closed() -> None:
    fds = open_fds()
    with pytest.raises(OSError, match="Invalid argument"):
        syscalls.make_memfd("lmlive-test", -1)
    assert open_fds() == fds


@pytest.mark.parametrize("allocate", [True, False])
def test_populate_makes_the_pages_of_its_range(allocate: bool) -> None:
    fd = syscalls.make_memfd("lmlive-test", 8 * PAGE)
    address = syscalls.map_shared(fd, 8 * PAGE)
    assert syscalls.populate(address, 2 * PAGE, 5 * PAGE, allocate=allocate)
    assert list(syscalls.written_ranges(fd, 8 * PAGE)) == [(2 * PAGE, 5 * PAGE)]
    syscalls.unmap(address, 8 * PAGE)
    os.close(fd)


def test_populate_of_pages_that_cannot_be_is_an_error_and_no_signal() -> None:
    fd = os.memfd_create("lmlive-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8 * PAGE)
    address = syscalls.map_shared(fd, 8 * PAGE)
    os.ftruncate(fd, PAGE)
    with pytest.raises(OSError, match="Bad address"):
        syscalls.populate(address, 0, 8 * PAGE, allocate=False)
    syscalls.unmap(address, 8 * PAGE)
    os.close(fd)


def test_an_advice_that_the_kernel_does_not_know_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "advise", lambda address, nbytes, advice: 22)
    assert not syscalls.populate(0, 0, PAGE, allocate=True)


def test_an_interrupted_advice_is_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([4, 11, 0])
    monkeypatch.setattr(syscalls, "advise", lambda address, nbytes, advice: next(answers))
    assert syscalls.populate(0, 0, PAGE, allocate=True)


def test_written_ranges_leave_out_holes() -> None:
    fd = syscalls.make_memfd("lmlive-test", 16 * PAGE)
    assert list(syscalls.written_ranges(fd, 16 * PAGE)) == []
    os.pwrite(fd, b"x" * PAGE, 0)
    os.pwrite(fd, b"x", 15 * PAGE)
    assert list(syscalls.written_ranges(fd, 16 * PAGE)) == [(0, PAGE), (15 * PAGE, 16 * PAGE)]
    assert list(syscalls.written_ranges(fd, 15 * PAGE)) == [(0, PAGE)]
    assert list(syscalls.written_ranges(fd, PAGE)) == [(0, PAGE)]
    os.close(fd)


def test_steps_cover_a_range_once() -> None:
    step = syscalls.STEP_BYTES
    assert list(syscalls.steps(0, 2 * step + 5)) == [(0, step), (step, 2 * step), (2 * step, 2 * step + 5)]
    assert list(syscalls.steps(7, 7)) == []
