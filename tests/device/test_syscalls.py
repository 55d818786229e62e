import fcntl
import os
import threading
from pathlib import Path

import pytest

from lmlive.device import syscalls
from tests.device.memfds import lingering_socket, open_fds

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


def test_only_memory_has_seals() -> None:
    fds = open_fds()
    memory = syscalls.make_memfd("lmlive-test", PAGE)
    plain = os.memfd_create("lmlive-test")
    pipe = os.pipe()
    assert syscalls.seals_of(memory) == syscalls.F_SEAL_SEAL | syscalls.F_SEAL_SHRINK | syscalls.F_SEAL_GROW
    assert syscalls.seals_of(plain) == syscalls.F_SEAL_SEAL
    with pytest.raises(OSError, match="Invalid argument"):
        syscalls.seals_of(pipe[0])
    for fd in (memory, plain, *pipe):
        syscalls.close_foreign(fd)
    assert open_fds() == fds


def test_a_file_opened_again_has_flags_of_its_own() -> None:
    fd = os.memfd_create("lmlive-test")
    os.write(fd, b"first")
    again = syscalls.reopen(fd)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    assert os.pwrite(again, b"F", 0) == 1
    assert os.pread(fd, 9, 0) == b"First"
    os.close(again)
    syscalls.close_foreign(fd)


def test_closing_what_is_closed_already_is_no_error() -> None:
    syscalls.close_foreign(-1)
    syscalls.close_foreign(99999)


def test_closing_a_socket_that_lingers_does_not_wait_for_its_far_end() -> None:
    fd, far = lingering_socket()
    thread = threading.Thread(target=syscalls.close_foreign, args=(fd,), daemon=True)
    thread.start()
    thread.join(5)
    waits = thread.is_alive()
    far.close()
    thread.join(5)
    assert not waits


def test_the_address_space_holds_all_mappings() -> None:
    fd = syscalls.make_memfd("lmlive-test", PAGE)
    address = syscalls.map_shared(fd, PAGE)
    assert address < syscalls.address_space()
    syscalls.unmap(address, PAGE)
    os.close(fd)
