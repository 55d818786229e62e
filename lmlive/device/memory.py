"""Memory that a worker shares: ``shared_empty`` makes it, ``find`` tells which descriptor an address belongs to.

Each allocation is a sealed memfd mapped here. Mapping and descriptor live exactly as long as any array, tensor or view
over them: all of them keep one buffer object alive, whose end unmaps and closes. No thread, no lock: what the registry
does to its dict is one step each. A forked child inherits working mappings of the same memory.
"""

import ctypes
import importlib
import math
import operator
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from lmlive.device import syscalls
from lmlive.errors import DeviceError, InvalidArgument

_MAX_BYTES = 2**62
_MAX_AXES = 32


class SharedMemory(NamedTuple):
    """A descriptor and a place in it.

    Args:
        fd: Borrowed: open for as long as the memory at the address is in use.
        offset: Bytes from the file's first byte.
        nbytes: Size of the whole file.
    """

    fd: int
    offset: int
    nbytes: int


class _Allocation(NamedTuple):
    address: int
    fd: int
    nbytes: int


_allocations: dict[int, _Allocation] = {}


def shared_empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: Any) -> Any:
    """Make zeroed memory that an lmlive server on this host can map: the fastest kind for a KV cache.

    Pages are allocated as they are first touched. The memory lives for as long as the result or any view of it.

    Args:
        shape: An int, or a sequence of ints, each at least 1.
        dtype: A numpy dtype, or a name numpy knows: the result is a ``numpy.ndarray``. A ``torch.dtype``, or any other
            torch name ("bfloat16", "float8_e4m3fn", "torch.float16"): the result is a ``torch.Tensor``.

    Raises:
        InvalidArgument: A shape or dtype that is none; or torch is needed and missing.
        DeviceError: The system has no memory or descriptor to give.
    """
    axes = _axes_of(shape)
    found = _numpy_dtype(dtype)
    library: Any = np
    if found is None:
        library, found = _torch_dtype(dtype)
    nbytes = math.prod(axes) * found.itemsize
    if nbytes > _MAX_BYTES:
        raise InvalidArgument(f"shape {axes} of {dtype} has more bytes than memory can have", shape=list(axes))
    return library.frombuffer(_allocate(nbytes), dtype=found).reshape(axes)


def find(address: int, nbytes: int) -> SharedMemory | None:
    """Give the descriptor of the allocation that holds all these bytes; None if we made none such."""
    for allocation in list(_allocations.values()):
        offset = address - allocation.address
        if offset >= 0 and offset + nbytes <= allocation.nbytes:
            return SharedMemory(allocation.fd, offset, allocation.nbytes)
    return None


def _allocate(nbytes: int) -> ctypes.Array[ctypes.c_uint8]:
    try:
        fd = syscalls.make_memfd("lmlive-kv", nbytes)
        try:
            address = syscalls.map_shared(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise DeviceError(f"no shared memory of {nbytes} bytes: {error}", errno=error.errno, nbytes=nbytes) from error
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    _allocations[address] = _Allocation(address, fd, nbytes)
    # Not at exit: arrays may be in use until the very end of the process, which ends the mapping as well.
    weakref.finalize(buffer, _release, address).atexit = False
    return buffer


def _release(address: int) -> None:
    allocation = _allocations.pop(address)
    syscalls.unmap(address, allocation.nbytes)
    os.close(allocation.fd)


def _axes_of(shape: object) -> tuple[int, ...]:
    items: Sequence[object] = [shape] if not isinstance(shape, Sequence) or isinstance(shape, str) else shape
    if not all(hasattr(item, "__index__") and not isinstance(item, bool) for item in items):
        raise InvalidArgument(f"a shape is an int or a sequence of ints, not {shape!r}", shape=repr(shape))
    axes = tuple(operator.index(item) for item in items)  # type: ignore[arg-type]
    if not 1 <= len(axes) <= _MAX_AXES or min(axes) < 1:
        raise InvalidArgument(f"a shape has 1 to {_MAX_AXES} axes of at least 1, not {axes}", shape=list(axes))
    return axes


def _numpy_dtype(dtype: object) -> Any:
    """Give the numpy dtype; None for what only torch can know."""
    if dtype is None or type(dtype).__module__.partition(".")[0] == "torch":
        return None
    try:
        found: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    if isinstance(dtype, str) and found.isbuiltin != 1 and found.isnative:
        return None  # a name that some other package taught numpy belongs to torch
    if found.hasobject or found.itemsize == 0:
        raise InvalidArgument(f"dtype {found} holds no plain numbers: it cannot be shared", dtype=str(found))
    return found


def _torch_dtype(dtype: object) -> tuple[Any, Any]:
    """Give torch and its dtype."""
    named = isinstance(dtype, str)
    if not named and type(dtype).__module__.partition(".")[0] != "torch":
        raise InvalidArgument(f"{dtype!r} is no dtype: give one of numpy or torch, or its name", dtype=repr(dtype))
    torch = _torch()
    found = getattr(torch, str(dtype).removeprefix("torch."), None) if named else dtype
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"neither numpy nor torch knows a dtype {dtype!r}", dtype=repr(dtype))
    if str(found).startswith(("torch.qint", "torch.quint")):  # they need a quantizer beside their bytes
        raise InvalidArgument(f"torch dtype {found} cannot lie over shared memory", dtype=str(found))
    return torch, found


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise InvalidArgument("this dtype needs torch: pip install 'lmlive[torch]'", extra="torch") from error
