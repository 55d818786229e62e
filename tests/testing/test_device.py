import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lmlive.device.backend import Chunk, DeviceBackend, FdSource, GroupPlace, PlanePlace
from lmlive.errors import HandleOpenError, InternalError, InvalidHandle
from lmlive.testing import RecordingBackend
from tests.conftest import eventually

GROUPS = [GroupPlace(4, (PlanePlace(0, 0, 16, 16), PlanePlace(0, 64, 16, 8)))]
NBYTES = 128


def test_it_is_a_backend_and_keeps_a_ledger() -> None:
    recording = RecordingBackend()
    backend: DeviceBackend = recording
    first, second = (backend.open_handle(FdSource(-1, NBYTES, 0)) for _ in range(2))
    backend.close_mapping(first)
    assert [(entry.step, entry.mapping) for entry in recording.ledger] == [("open", 1), ("open", 2), ("close", 1)]
    assert recording.still_open == [second]
    assert (recording.opened, recording.closed) == (2, 1)
    with pytest.raises(InternalError, match="closed twice"):
        backend.close_mapping(first)


def test_each_of_many_threads_gets_a_mapping_of_its_own() -> None:
    backend = RecordingBackend()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            opened = list(threads.map(backend.open_handle, [FdSource(-1, 8, 0)] * 2000))
    finally:
        sys.setswitchinterval(before)
    assert sorted(mapping.number for mapping in opened) == list(range(1, 2001))


def test_it_copies_what_a_real_one_copies() -> None:
    backend = RecordingBackend()
    mapping = backend.open_handle(FdSource(-1, NBYTES, 0))
    placement = backend.place([mapping], GROUPS)
    mapping.memory[:] = np.arange(NBYTES, dtype=np.uint8)
    out = np.zeros(2 * 16 + 2 * 8, dtype=np.uint8)
    assert backend.gather(placement, Chunk([[3, 1]], out), lambda: True)
    expected = [*range(48, 64), *range(16, 32), *range(112, 120), *range(80, 88)]
    assert out.tolist() == expected
    mapping.memory[:] = 0
    assert backend.scatter(placement, Chunk([[0, 2]], out, skip=[1]), lambda: True)
    assert mapping.memory[:16].tolist() == [0] * 16
    assert mapping.memory[32:48].tolist() == expected[16:32]
    backend.fence(placement)
    assert not backend.gather(placement, Chunk([[0, 1]], out), lambda: False)
    backend.close_mapping(mapping)
    with pytest.raises(InternalError, match="after its close"):
        backend.gather(placement, Chunk([[0, 1]], out), lambda: True)


def test_a_plane_outside_of_its_handle_is_refused() -> None:
    backend = RecordingBackend()
    mapping = backend.open_handle(FdSource(-1, NBYTES - 60, 0))
    with pytest.raises(InvalidHandle):
        backend.place([mapping], GROUPS)
    with pytest.raises(InvalidHandle):
        backend.place([], GROUPS)


def test_it_fails_as_often_as_it_is_told() -> None:
    backend = RecordingBackend()
    backend.fail("open", HandleOpenError("the driver says no"), times=2)
    for _ in range(2):
        with pytest.raises(HandleOpenError):
            backend.open_handle(FdSource(-1, NBYTES, 0))
    backend.open_handle(FdSource(-1, NBYTES, 0))
    assert backend.opened == 1


async def test_it_hangs_at_a_gate() -> None:
    backend = RecordingBackend()
    mapping = backend.open_handle(FdSource(-1, NBYTES, 0))
    gate = backend.gate("close")
    thread = threading.Thread(target=backend.close_mapping, args=(mapping,))
    thread.start()
    await eventually(lambda: gate.waiting == 1)
    assert backend.closed == 0
    gate.open()
    thread.join()
    assert backend.closed == 1
