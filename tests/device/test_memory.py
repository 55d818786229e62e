import gc
import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch

from lmlive.device import syscalls
from lmlive.device.memory import find, shared_empty
from lmlive.errors import DeviceError, InvalidArgument
from tests.device.memfds import mappings_of, open_fds


def address_of(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize(
    "dtype", ["float16", np.float16, np.dtype("float16"), "f2", float, "uint8", "int64", "complex64"]
)
def test_a_dtype_that_numpy_knows_gives_a_zeroed_array(dtype: npt.DTypeLike) -> None:
    array = shared_empty((3, 4), dtype)
    assert type(array) is np.ndarray
    assert array.shape == (3, 4)
    assert array.dtype == np.dtype(dtype)
    assert not array.any()
    array[1, 2] = 5
    assert array[1, 2] == 5


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ("torch.float16", torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_any_other_name_of_torch_gives_a_zeroed_tensor(dtype: object, expected: torch.dtype) -> None:
    tensor = shared_empty([2, 8], dtype)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype is expected
    assert tuple(tensor.shape) == (2, 8)
    assert not tensor.view(torch.uint8).any()
    tensor[1].fill_(1.0)
    assert float(tensor.to(torch.float32).sum()) == 8.0


def test_an_int_is_a_shape() -> None:
    assert shared_empty(7, "uint8").shape == (7,)
    assert shared_empty((np.int64(2), 3), "uint8").shape == (2, 3)


@pytest.mark.parametrize(
    "shape", [(), (0,), (2, 0), (-1,), 0, 1.5, "ab", None, (1, "x"), (True, 2), (2**62, 4), [1] * 99]
)
def test_a_shape_that_is_none_is_refused(shape: object) -> None:
    with pytest.raises(InvalidArgument, match=r"shape"):
        shared_empty(shape, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["nonsense", None, 5, object, "O", "S0", "V0", "torch.nonsense", "tensor", "quint8"])
def test_a_dtype_that_is_none_is_refused(dtype: object) -> None:
    with pytest.raises(InvalidArgument):
        shared_empty((2,), dtype)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert shared_empty((2,), "float32").dtype == np.float32
    with pytest.raises(InvalidArgument, match=r"pip install 'lmlive\[torch\]'"):
        shared_empty((2,), "bfloat16")


def test_numpy_memory_imports_no_torch() -> None:
    code = (
        "import sys; from lmlive.device.memory import shared_empty; shared_empty((4,), 'float32');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_memory_is_a_memfd_that_nobody_can_resize() -> None:
    array = shared_empty((4096,), "uint8")
    shared = find(address_of(array), 4096)
    assert shared is not None
    assert syscalls.seals_of(shared.fd) == syscalls.F_SEAL_SEAL | syscalls.F_SEAL_SHRINK | syscalls.F_SEAL_GROW
    assert not os.get_inheritable(shared.fd)
    for size in (0, 1, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(shared.fd, size)
    os.pwrite(shared.fd, b"\x07", 100)
    assert array[100] == 7


def test_any_view_is_found_with_its_offset() -> None:
    array = shared_empty((4, 1024), "float32")
    view = array[2, 10:20]
    shared = find(address_of(view), view.nbytes)
    assert shared is not None
    assert shared.offset == 2 * 4096 + 40
    assert shared.nbytes == 4 * 4096
    tensor = torch.from_numpy(view)
    assert find(tensor.data_ptr(), 40) == shared


def test_what_is_not_ours_is_not_found() -> None:
    array = shared_empty((4096,), "uint8")
    foreign = np.zeros(4096, np.uint8)
    assert find(address_of(foreign), 4096) is None
    assert find(address_of(array), 4097) is None
    assert find(address_of(array) - 1, 10) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_and_descriptor_end_with_the_last_view(dtype: str) -> None:
    fds = open_fds()
    whole = shared_empty((8, 512), dtype)
    whole[3] = 2
    view = whole[3, 5:]
    assert len(mappings_of("lmlive-kv")) == 1
    del whole
    gc.collect()
    assert len(mappings_of("lmlive-kv")) == 1
    assert float(view.min()) == 2
    del view
    gc.collect()
    assert mappings_of("lmlive-kv") == []
    assert open_fds() == fds


def test_a_tensor_over_an_array_keeps_its_memory() -> None:
    tensor = torch.from_numpy(shared_empty((1024,), "float32"))
    gc.collect()
    tensor.fill_(3)
    raw = memoryview(tensor.numpy())  # type: ignore[arg-type]
    del tensor
    gc.collect()
    assert raw[1023] == 3.0
    assert len(mappings_of("lmlive-kv")) == 1
    del raw
    gc.collect()
    assert mappings_of("lmlive-kv") == []


def test_memory_still_in_use_at_the_end_of_the_process_stays_valid() -> None:
    code = (
        "import atexit\n"
        "from lmlive.device.memory import shared_empty\n"
        "array = shared_empty((1 << 20,), 'uint8')\n"
        "class Late:\n"
        "    def __del__(self): array_[5] = 1\n"
        "array_ = array\n"
        "atexit.register(lambda: array.fill(1))\n"
        "late = Late()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_forked_child_shares_the_memory_and_ends_without_harm() -> None:
    code = (
        "import os, gc\n"
        "from lmlive.device.memory import shared_empty, find\n"
        "array = shared_empty((4096,), 'uint8')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    array[:] = 9\n"
        "    del array\n"
        "    gc.collect()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "assert array.all() and find(array.__array_interface__['data'][0], 4096)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_memory_and_no_descriptor_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(syscalls, "map_shared", refuse)
    fds = open_fds()
    with pytest.raises(DeviceError, match="Cannot allocate memory"):
        shared_empty((16,), "uint8")
    assert open_fds() == fds


def test_pages_are_allocated_as_they_are_touched() -> None:
    array = shared_empty((64 << 20,), "uint8")
    shared = find(address_of(array), 1)
    assert shared is not None
    assert os.fstat(shared.fd).st_blocks == 0
    array[5 << 20] = 1
    assert list(syscalls.written_ranges(shared.fd, shared.nbytes)) == [(5 << 20, (5 << 20) + syscalls.PAGE_BYTES)]
