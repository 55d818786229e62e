import os
import resource
import threading
from pathlib import Path

import pytest

from lmlive.device import limits, syscalls
from lmlive.device.host import HostBackend
from lmlive.device.limits import Share, process_limits
from lmlive.errors import ServerBusy
from tests.device.memfds import random_bytes, unsealed_source


def test_a_share_is_taken_up_to_its_limit() -> None:
    share = Share("things", 10)
    share.take(7)
    with pytest.raises(ServerBusy, match="7 of 10 things") as caught:
        share.take(4)
    assert caught.value.fields == {"retry_after": 1.0, "limit": 10, "in_use": 7}
    share.take(3)
    share.give_back(10)
    assert share.in_use == 0


def test_threads_take_a_share_together() -> None:
    share = Share("things", 1000)

    def take_many() -> None:
        for _ in range(250):
            share.take()

    threads = [threading.Thread(target=take_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert share.in_use == 1000


def test_the_limits_are_those_of_the_system_when_a_backend_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    real = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: real[kind])
    real[resource.RLIMIT_NOFILE] = (1000, 4000)
    real[resource.RLIMIT_AS] = (-1, -1)
    found = process_limits()
    assert found.descriptors.limit == 250
    assert found.addresses.limit == syscalls.address_space() // 2
    assert found.handle_bytes == syscalls.address_space() // 8
    assert found.mappings.limit == 32765
    real[resource.RLIMIT_NOFILE] = (-1, -1)
    real[resource.RLIMIT_AS] = (1 << 40, -1)
    found = process_limits()
    assert found.descriptors.limit == 1 << 18
    assert found.addresses.limit == 1 << 39
    real[resource.RLIMIT_NOFILE] = (1, 1)
    assert process_limits().descriptors.limit == 1
    monkeypatch.undo()
    process_limits()


def test_all_backends_of_a_process_draw_on_the_same_shares() -> None:
    one, two = HostBackend(), HostBackend()
    before = process_limits().descriptors.in_use
    mappings = [backend.open_handle(unsealed_source(random_bytes(8))) for backend in (one, two)]
    assert process_limits().descriptors.in_use == before + 2
    for backend, mapping in zip((two, one), mappings, strict=True):
        backend.close_mapping(mapping)
    assert process_limits().descriptors.in_use == before


def test_descriptors_are_counted_whatever_their_numbers_are() -> None:
    before = limits.descriptors_in_use()
    fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(200)]
    for fd in fds[::2]:
        os.close(fd)
    assert limits.descriptors_in_use() == before + 100
    for fd in fds[1::2]:
        os.close(fd)
    assert limits.descriptors_in_use() == before


def test_a_kernel_that_does_not_count_them_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Older(type(tmp_path)):  # type: ignore[misc]
        def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
            return os.stat_result((0,) * 10)

    for number in range(3):
        (tmp_path / str(number)).touch()
    monkeypatch.setattr(limits, "_OPEN", Older(tmp_path))
    assert limits.descriptors_in_use() == 3
