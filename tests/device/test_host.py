import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmlive.device import host, syscalls
from lmlive.device.backend import Bytes, Chunk, FdSource, GroupPlace, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.device.host import HostBackend, HostMapping
from lmlive.device.limits import HostLimits, Share
from lmlive.errors import HandleOpenError, InternalError, InvalidHandle, InvalidLayout, ServerBusy
from tests.device.memfds import (
    UID,
    always,
    gather,
    lingering_socket,
    mappings_of,
    one_plane,
    open_fds,
    random_bytes,
    scatter,
    sealed_source,
    unsealed_source,
)

PAGE = syscalls.PAGE_BYTES


def test_sealed_memory_is_mapped_and_its_descriptor_closed() -> None:
    fds = open_fds()
    backend = HostBackend()
    mapping = backend.open_handle(sealed_source(random_bytes(3 * PAGE)))
    assert open_fds() == fds
    assert mapping.nbytes == 3 * PAGE
    assert len(mappings_of("lmlive-test")) == 1
    backend.close_mapping(mapping)
    assert mappings_of("lmlive-test") == []
    with pytest.raises(InternalError):
        backend.close_mapping(mapping)


def test_unsealed_memory_of_our_user_is_never_mapped_but_kept_by_a_descriptor() -> None:
    fds = open_fds()
    backend = HostBackend()
    mapping = backend.open_handle(unsealed_source(random_bytes(PAGE)))
    assert mapping.nbytes == PAGE
    assert len(open_fds()) == len(fds) + 1
    assert mappings_of("lmlive-test") == []
    backend.close_mapping(mapping)
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []


def test_unsealed_memory_of_another_user_is_refused() -> None:
    source = unsealed_source(random_bytes(PAGE))
    with pytest.raises(InvalidHandle, match="not sealed") as caught:
        HostBackend().open_handle(source._replace(uid=UID + 1))
    assert caught.value.fields == {"uid": UID + 1, "server_uid": UID}
    sealed = sealed_source(random_bytes(PAGE))
    backend = HostBackend()
    backend.close_mapping(backend.open_handle(sealed._replace(uid=UID + 1)))


def test_only_what_was_claimed_is_mapped() -> None:
    backend = HostBackend()
    mapping = backend.open_handle(sealed_source(random_bytes(4 * PAGE))._replace(nbytes=PAGE))
    assert mapping.nbytes == PAGE
    with pytest.raises(InvalidHandle):
        backend.place([mapping], one_plane(2, PAGE))
    backend.close_mapping(mapping)


@pytest.mark.parametrize("nbytes", [4097, 2**40, 2**63, 0, -1])
def test_a_handle_smaller_than_it_says_is_refused(nbytes: int) -> None:
    fds = open_fds()
    with pytest.raises(InvalidHandle, match="needs"):
        HostBackend().open_handle(sealed_source(random_bytes(4096))._replace(nbytes=nbytes))
    assert open_fds() == fds


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "directory", "device", "disk", "write sealed", "read only", "unsealed, read only"]
)
def test_what_is_no_writable_memory_is_refused_and_closed(kind: str) -> None:
    fds = open_fds()
    rest: list[int] = []
    if kind == "pipe":
        fd, other = os.pipe()
        rest.append(other)
    elif kind == "socket":
        fd = socket.socket(socket.AF_UNIX).detach()
    elif kind == "directory":
        fd = os.open("/dev/shm", os.O_RDONLY)
    elif kind == "device":
        fd = os.open("/dev/zero", os.O_RDWR)
    elif kind == "disk":
        with tempfile.NamedTemporaryFile(dir=Path(__file__).parent) as file:
            file.truncate(PAGE)
            fd = os.dup(file.fileno())
    elif kind == "write sealed":
        fd = os.memfd_create("lmlive-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE)
        fcntl.fcntl(fd, 1033, syscalls.F_SEAL_SHRINK | 0x8)
    else:
        make = unsealed_source if kind.startswith("unsealed") else sealed_source
        writable = make(random_bytes(PAGE)).fd
        fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY)
        os.close(writable)
    with pytest.raises(InvalidHandle):
        HostBackend().open_handle(FdSource(fd, PAGE, UID))
    for other in rest:
        os.close(other)
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []


def test_a_mapping_that_the_system_refuses_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    fds = open_fds()
    source = sealed_source(random_bytes(PAGE))
    monkeypatch.setattr(syscalls, "map_shared", refuse)
    limits = small_limits()
    with pytest.raises(HandleOpenError, match="Cannot allocate memory"):
        HostBackend(limits=limits).open_handle(source)
    assert open_fds() == fds
    assert taken(limits) == (0, 0, 0)


def test_sealed_memory_whose_pages_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: int, start: int, stop: int, *, allocate: bool) -> bool:
        raise OSError(14, "Bad address")

    fds = open_fds()
    source = sealed_source(random_bytes(PAGE))
    limits = small_limits()
    monkeypatch.setattr(syscalls, "populate", fail)
    with pytest.raises(InvalidHandle, match="pages cannot be had"):
        HostBackend(limits=limits).open_handle(source)
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []
    assert taken(limits) == (0, 0, 0)


def test_memory_that_is_sealed_only_after_it_was_shrunk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = unsealed_source(random_bytes(4 * PAGE))

    def shrink_then_seal(fd: int) -> int:
        os.ftruncate(fd, PAGE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, syscalls.F_SEAL_SHRINK)
        return seals_of(fd)

    seals_of = syscalls.seals_of
    monkeypatch.setattr(syscalls, "seals_of", shrink_then_seal)
    with pytest.raises(InvalidHandle, match="needs"):
        HostBackend().open_handle(source)


def test_memory_of_huge_pages_is_refused_sealed_or_not() -> None:
    fds = open_fds()
    for seals in (0, syscalls.F_SEAL_SHRINK):
        fd = os.memfd_create("lmlive-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(InvalidHandle, match="huge pages"):
            HostBackend().open_handle(FdSource(fd, 2 << 20, UID))
    assert open_fds() == fds


def test_a_socket_that_lingers_is_refused_without_waiting_for_its_far_end() -> None:
    fd, far = lingering_socket()
    refused: list[Exception] = []

    def refuse() -> None:
        try:
            HostBackend().open_handle(FdSource(fd, PAGE, UID))
        except InvalidHandle as error:
            refused.append(error)

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    thread.join(5)
    waits = thread.is_alive()
    far.close()
    thread.join(5)
    assert not waits
    assert len(refused) == 1


def small_limits(*, descriptors: int = 2, mappings: int = 2, addresses: int = 8 * PAGE) -> HostLimits:
    return HostLimits(
        Share("descriptors", descriptors), Share("mappings", mappings), Share("bytes", addresses), addresses // 2
    )


def taken(limits: HostLimits) -> tuple[int, int, int]:
    return limits.descriptors.in_use, limits.mappings.in_use, limits.addresses.in_use


@pytest.mark.parametrize(("make", "share", "limit"), [(unsealed_source, 0, 2), (sealed_source, 1, 2)])
def test_more_handles_than_this_process_can_spare_are_told_to_come_again(
    make: Callable[[Bytes], FdSource], share: int, limit: int
) -> None:
    fds = open_fds()
    limits = small_limits()
    backend = HostBackend(limits=limits)
    opened = [backend.open_handle(make(random_bytes(PAGE))) for _ in range(limit)]
    assert taken(limits)[share] == limit
    with pytest.raises(ServerBusy) as caught:
        backend.open_handle(make(random_bytes(PAGE)))
    assert caught.value.fields == {"retry_after": 1.0, "limit": limit, "in_use": limit}
    backend.close_mapping(opened.pop())
    opened.append(backend.open_handle(make(random_bytes(PAGE))))
    for mapping in opened:
        backend.close_mapping(mapping)
    assert taken(limits) == (0, 0, 0)
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []


def sparse_source(nbytes: int) -> FdSource:
    return FdSource(syscalls.make_memfd("lmlive-test", nbytes), nbytes, UID)


def test_handles_without_pages_cannot_take_all_addresses() -> None:
    fds = open_fds()
    limits = small_limits(mappings=9)
    backend = HostBackend(limits=limits)
    with pytest.raises(InvalidHandle, match="one handle") as large:
        backend.open_handle(sparse_source(5 * PAGE))
    assert large.value.fields == {"size": 5 * PAGE, "limit": 4 * PAGE}
    opened = [backend.open_handle(sparse_source(4 * PAGE)) for _ in range(2)]
    with pytest.raises(ServerBusy) as caught:
        backend.open_handle(sparse_source(PAGE))
    assert caught.value.fields == {"retry_after": 1.0, "limit": 8 * PAGE, "in_use": 8 * PAGE}
    assert taken(limits) == (0, 2, 8 * PAGE)
    for mapping in opened:
        backend.close_mapping(mapping)
    assert taken(limits) == (0, 0, 0)
    assert open_fds() == fds


def test_what_this_process_spares_leaves_room_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "read_available_memory", lambda: 1 << 60)
    backend = HostBackend()
    with pytest.raises(InvalidHandle, match="one handle"):
        backend.open_handle(sparse_source(32 << 40))
    opened: list[HostMapping] = []
    with pytest.raises(ServerBusy):
        opened.extend(backend.open_handle(sparse_source(8 << 40)) for _ in range(9))
    assert len(opened) == 8
    thread = threading.Thread(target=opened.reverse)
    thread.start()
    thread.join()
    for mapping in opened:
        backend.close_mapping(mapping)


def test_memory_that_cannot_be_opened_again_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> int:
        raise OSError(24, "Too many open files")

    fds = open_fds()
    limits = small_limits()
    monkeypatch.setattr(syscalls, "reopen", refuse)
    with pytest.raises(HandleOpenError, match="Too many"):
        HostBackend(limits=limits).open_handle(unsealed_source(random_bytes(PAGE)))
    assert taken(limits) == (0, 0, 0)
    assert open_fds() == fds


def test_a_kernel_that_cannot_populate_maps_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(address: int, start: int, stop: int, *, allocate: bool) -> bool:
        return False

    monkeypatch.setattr(syscalls, "populate", unknown)
    backend = HostBackend()
    backend.close_mapping(backend.open_handle(sealed_source(random_bytes(3 * PAGE))))


def test_holes_of_sealed_memory_stay_holes() -> None:
    fd = syscalls.make_memfd("lmlive-test", 64 * PAGE)
    os.pwrite(fd, b"x", 10 * PAGE)
    backend = HostBackend()
    mapping = backend.open_handle(FdSource(os.dup(fd), 64 * PAGE, UID))
    assert list(syscalls.written_ranges(fd, 64 * PAGE)) == [(10 * PAGE, 11 * PAGE)]
    backend.close_mapping(mapping)
    os.close(fd)


def test_a_peer_that_shrinks_unsealed_memory_gets_a_typed_error_and_kills_nobody() -> None:
    run, blocks = 4 * PAGE, 4
    source = unsealed_source(random_bytes(run * blocks))
    peer = os.dup(source.fd)
    context = CacheContext.open(HostBackend(), [source], one_plane(blocks, run))
    out = np.zeros(run * blocks, np.uint8)
    assert gather(context, [range(blocks)], out, always)
    os.ftruncate(peer, run)
    with pytest.raises(InvalidHandle, match="shrank"):
        gather(context, [range(blocks)], out, always)
    with pytest.raises(InvalidHandle, match="shrank"):
        scatter(context, [range(blocks)], out, always)
    context.close()
    os.close(peer)


def test_the_size_is_checked_before_each_slice() -> None:
    run = 8 << 20
    source = unsealed_source(np.ones(3 * run, np.uint8))
    peer = os.dup(source.fd)
    context = CacheContext.open(HostBackend(), [source], one_plane(3, run))
    asked = []

    def shrink_after_the_second() -> bool:
        asked.append(1)
        if len(asked) == 2:
            os.ftruncate(peer, 2 * run)
        return True

    with pytest.raises(InvalidHandle, match="shrank"):
        gather(context, [range(3)], np.zeros(3 * run, np.uint8), shrink_after_the_second)
    assert len(asked) == 2
    context.close()
    os.close(peer)


def test_shrunk_memory_that_is_mapped_would_end_the_process() -> None:
    code = (
        "import os; from lmlive.device import syscalls as s\n"
        "fd = os.memfd_create('lmlive-test'); os.ftruncate(fd, 8192)\n"
        "view = s.view_of(s.map_shared(fd, 8192), 8192); os.ftruncate(fd, 0); view[0] = 1\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGBUS


@pytest.mark.parametrize(
    ("place", "error", "field"),
    [
        (PlanePlace(0, 4, 64, 64), InvalidLayout, "offset"),
        (PlanePlace(0, -8, 64, 64), InvalidLayout, "offset"),
        (PlanePlace(0, 0, 68, 64), InvalidLayout, "stride"),
        (PlanePlace(0, 0, -64, 64), InvalidLayout, "stride"),
        (PlanePlace(0, 0, 56, 64), InvalidLayout, "stride"),
        (PlanePlace(0, 0, 64, 60), InvalidLayout, "run"),
        (PlanePlace(0, 0, 64, 0), InvalidLayout, "run"),
        (PlanePlace(1, 0, 64, 64), InvalidHandle, "handle"),
        (PlanePlace(-1, 0, 64, 64), InvalidHandle, "handle"),
        (PlanePlace(0, PAGE - 120, 64, 64), InvalidHandle, "needed"),
        (PlanePlace(0, 0, PAGE, 64), InvalidHandle, "needed"),
    ],
)
def test_a_plane_outside_its_memory_or_off_the_words_is_refused(
    place: PlanePlace, error: type[Exception], field: str
) -> None:
    fds = open_fds()
    with pytest.raises(error) as caught:
        CacheContext.open(HostBackend(), [sealed_source(random_bytes(PAGE))], [GroupPlace(2, (place,))])
    assert field in {*caught.value.fields, caught.value.fields.get("field")}  # type: ignore[attr-defined]
    assert open_fds() == fds
    assert mappings_of("lmlive-test") == []


def test_a_mapping_of_another_device_is_our_own_error() -> None:
    class Other:
        nbytes = 8

    with pytest.raises(InternalError, match="another device"):
        HostBackend().close_mapping(Other())


def test_chunk_and_memory_must_agree() -> None:
    context = CacheContext.open(HostBackend(), [sealed_source(random_bytes(PAGE))], one_plane(8, 64))
    with pytest.raises(InternalError, match="another size"):
        gather(context, [[1, 2]], np.zeros(64, np.uint8), always)
    with pytest.raises(InternalError, match="number of groups"):
        context.gather_chunks([Chunk([[1], [2]], np.zeros(128, np.uint8))], always)
    context.close()


def test_the_mapping_says_what_it_holds() -> None:
    assert HostMapping(4096, 64).nbytes == 64


def test_memory_without_pages_must_fit_into_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's container may be larger than the server's, and whoever touches a page first pays for it."""
    backend = HostBackend()
    monkeypatch.setattr(host, "read_available_memory", lambda: 100 * PAGE)
    first = backend.open_handle(sealed_holes(60 * PAGE))
    with pytest.raises(ServerBusy, match="write to it first") as caught:
        backend.open_handle(sealed_holes(40 * PAGE))
    assert caught.value.fields == {"retry_after": 1.0, "missing": 40 * PAGE, "available": 80 * PAGE, "owed": 60 * PAGE}
    second = backend.open_handle(sealed_holes(40 * PAGE, filled=30 * PAGE))
    syscalls.view_of(first.address, 60 * PAGE)[:] = 1  # what was filled is owed no more
    third = backend.open_handle(sealed_holes(70 * PAGE))
    backend.close_mapping(third)
    fourth = backend.open_handle(sealed_holes(70 * PAGE))
    for mapping in (first, second, fourth):
        backend.close_mapping(mapping)


def sealed_holes(nbytes: int, *, filled: int = 0) -> FdSource:
    fd = syscalls.make_memfd("lmlive-test", nbytes)
    if filled:
        os.posix_fallocate(fd, 0, filled)
    return FdSource(fd, nbytes, os.geteuid())
