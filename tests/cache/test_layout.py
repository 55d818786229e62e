import hashlib
from itertools import product
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.layout import MAX_GROUPS, MAX_PLANES, Group, KVLayout, Plane
from lmlive.errors import InvalidLayout
from lmlive.protocol import parts as wire

Array = npt.NDArray[Any]


class TorchLike:
    """A tensor as torch shows it: strides in elements, from a method."""

    def __init__(self, array: Array, dtype: str | None = None) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = f"torch.{dtype or array.dtype.name}"

    def element_size(self) -> int:
        return self._array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._array.itemsize for step in self._array.strides)


class Odd:
    """Something with an attribute or two of a tensor."""

    def __init__(self, **facts: object) -> None:
        self.__dict__.update(facts)

    def stride(self) -> tuple[int, ...]:
        raise RuntimeError("no strides")

    def element_size(self) -> int:
        return 4


def layout_of(array: Array, **settings: Any) -> KVLayout:
    return KVLayout.from_tensors({"kv": array}, **{"block_tokens": 16, **settings})


def planes_of(layout: KVLayout) -> tuple[Plane, ...]:
    return layout.groups[0].planes


def blocks_by(plane: Plane, memory: bytes, first: int, num_blocks: int) -> list[bytes]:
    starts = [first + plane.offset + block * plane.stride for block in range(num_blocks)]
    return [memory[start : start + plane.run] for start in starts]


# Reading tensors


def test_a_plain_cache_is_one_plane() -> None:
    layout = layout_of(np.zeros((10, 16, 2, 4), np.float32), format="fa3")
    assert layout == KVLayout((Group(16, 10, (Plane("kv", 0, 512, 512, (16, 2, 4), (0, 1, 2), "float32"),)),), "fa3")
    assert layout.groups[0].block_bytes == 512


def test_axes_before_the_block_axis_unroll_row_major() -> None:
    layout = layout_of(np.zeros((2, 3, 10, 16, 4), np.float16), block_axis=2)
    assert [plane.offset for plane in planes_of(layout)] == [index * 10 * 128 for index in range(6)]
    assert {plane.run for plane in planes_of(layout)} == {128}
    assert layout.groups[0].num_blocks == 10


def test_views_that_interleave_their_planes() -> None:
    cache = np.zeros((10, 2, 16, 4), np.float32).transpose(1, 0, 2, 3)
    layout = layout_of(cache, block_axis=1)
    assert [(plane.offset, plane.stride, plane.run) for plane in planes_of(layout)] == [(0, 512, 256), (256, 512, 256)]


def test_axes_in_another_order_are_dense_too_and_have_another_key() -> None:
    by_head = np.zeros((10, 2, 16, 4), np.float32).transpose(0, 2, 1, 3)  # [B,T,H,D] stored as [B,H,T,D]
    layout = layout_of(by_head)
    assert planes_of(layout)[0].in_block_shape == (16, 2, 4)
    assert planes_of(layout)[0].stride_order == (1, 0, 2)
    assert layout.layout_key != layout_of(np.zeros((10, 16, 2, 4), np.float32)).layout_key


def test_padding_between_blocks_is_stepped_over() -> None:
    layout = layout_of(np.zeros((10, 80), np.float32)[:, :64])
    assert (planes_of(layout)[0].stride, planes_of(layout)[0].run) == (320, 256)


def test_strides_of_axes_of_size_one_are_free() -> None:
    array = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (1, 1, 16, 1, 4), (-8, 0, 16, 3, 4))
    plane = planes_of(layout_of(array, block_axis=1))[0]
    assert (plane.offset, plane.stride, plane.run, plane.stride_order) == (0, 256, 256, (0, 1, 2))


def test_numpy_and_torch_give_equal_layouts() -> None:
    array = np.zeros((2, 10, 16, 2, 4), np.float16)
    ours = layout_of(array, block_axis=1)
    theirs = KVLayout.from_tensors({"kv": TorchLike(array)}, block_tokens=16, block_axis=1)
    assert ours == theirs
    assert ours.layout_key == theirs.layout_key
    assert theirs.kv_dtype == "float16"


@pytest.mark.torch
def test_real_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    layout = KVLayout.from_tensors({"kv": torch.zeros(2, 10, 16, 2, 4)}, block_tokens=16, block_axis=1)
    assert layout == layout_of(np.zeros((2, 10, 16, 2, 4), np.float32), block_axis=1)
    shifted = torch.zeros(11, 16, 4, dtype=torch.bfloat16)[1:]
    assert planes_of(KVLayout.from_tensors({"kv": shifted}, block_tokens=16))[0].offset == 0
    assert KVLayout.from_tensors({"kv": shifted}, block_tokens=16).kv_dtype == "bfloat16"
    for wrong, field in (
        (torch.zeros(10, 8).to_sparse(), "strides"),
        (torch.zeros(1, 8).expand(10, 8), "strides"),
        (torch.zeros(10, 0, 8), "shape"),
    ):
        with pytest.raises(InvalidLayout) as caught:
            KVLayout.from_tensors({"kv": wrong}, block_tokens=16)
        assert caught.value.fields == {"tensor": "kv", "field": field}


def test_several_groups_number_their_tensors_through() -> None:
    full = {"a": np.zeros((10, 16, 4), np.float32), "b": np.zeros((2, 10, 16, 4), np.float16)}
    window = {"a": np.zeros((5, 8, 4), np.float32)}
    layout = KVLayout.from_tensors([full, window], block_tokens=[16, 8], block_axis={"a": 0, "b": 1})
    assert [[plane.handle for plane in group.planes] for group in layout.groups] == [[0, 1, 1], [2]]
    assert [(group.block_tokens, group.num_blocks) for group in layout.groups] == [(16, 10), (8, 5)]
    assert layout.kv_dtype == "float32,float16,float16,float32"
    assert layout.chunk_bytes(256) == 16 * (256 + 2 * 128) + 32 * 128
    assert (layout.blocks_per_chunk(0, 256), layout.blocks_per_chunk(1, 256)) == (16, 32)
    same = KVLayout.from_tensors([{"x": full["a"]}, {"x": full["a"]}], block_tokens=16)
    assert same.kv_dtype == "float32"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"kv_caches": {}}, "", "groups"),
    ({"kv_caches": []}, "", "groups"),
    ({"kv_caches": [{}]}, "", "groups"),
    ({"kv_caches": ["x"]}, "", "groups"),
    ({"kv_caches": None}, "", "groups"),
    ({"kv_caches": np.zeros((2, 8))}, "", "groups"),
    ({"block_tokens": None}, "kv", "block_tokens"),
    ({"block_tokens": 16.0}, "kv", "block_tokens"),
    ({"block_tokens": "16"}, "kv", "block_tokens"),
    ({"block_tokens": []}, "", "block_tokens"),
    ({"kv_caches": [{"x": np.zeros((2, 8))}], "block_tokens": [16, 16]}, "", "block_tokens"),
    ({"block_tokens": 0}, "kv", "block_tokens"),
    ({"block_tokens": -16}, "kv", "block_tokens"),
    ({"block_tokens": True}, "kv", "block_tokens"),
    ({"block_tokens": [16.0]}, "kv", "block_tokens"),
    ({"block_axis": 2}, "kv", "block_axis"),
    ({"block_axis": -1}, "kv", "block_axis"),
    ({"block_axis": True}, "kv", "block_axis"),
    ({"block_axis": {"other": 0}}, "kv", "block_axis"),
    ({"format": 3}, "", "format"),
    ({"format": "x" * 1025}, "", "format"),
    ({"format": "\ud800"}, "", "format"),
    ({"kv_caches": {"kv": [1, 2]}}, "kv", "type"),
    ({"kv_caches": {"kv": Odd(dtype="torch.float32", shape=(2, 8))}}, "kv", "type"),
    ({"kv_caches": {"kv": Odd(dtype="torch.float32", shape=None)}}, "kv", "type"),
    ({"kv_caches": {"kv": np.zeros(())}}, "kv", "shape"),
    ({"kv_caches": {"kv": np.zeros((0, 8))}}, "kv", "shape"),
    ({"kv_caches": {"kv": np.zeros((2, 0))}}, "kv", "shape"),
    ({"kv_caches": {"kv": np.broadcast_to(np.zeros((1, 8)), (2, 8))}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.broadcast_to(np.zeros((2, 1)), (2, 8))}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((2, 8))[::-1]}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.lib.stride_tricks.as_strided(np.zeros(9), (2, 8), (8, 8))}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((2, 8, 8))[:, :, ::2]}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((4, 8, 4)).transpose(1, 0, 2)[:, ::2]}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((8, 2)).T}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((2, 9), np.uint8)[:, :8]}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((2, 9), np.float32)[:, :8]}}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((2, 17), np.uint8)[:, :16].reshape(2, 2, 8)}, "block_axis": 1}, "kv", "strides"),
    ({"kv_caches": {"kv": np.zeros((2, 7), np.uint8)}}, "kv", "run"),
    ({"kv_caches": {"kv": np.zeros((2, 8), ">f4")}}, "kv", "dtype"),
    ({"kv_caches": {"kv": np.zeros((2, 8), object)}}, "kv", "dtype"),
    ({"kv_caches": {"kv": np.zeros((2, 8), [("a", "f4")])}}, "kv", "dtype"),
    ({"kv_caches": {"kv": np.zeros((2, 8)), "w": np.zeros((3, 8))}}, "w", "num_blocks"),
    ({"kv_caches": [{"kv": np.zeros((2, 8))}] * 65}, "", "groups"),
    ({"kv_caches": {"kv": np.zeros((4097, 2, 8))}, "block_axis": 1}, "kv", "planes"),
    ({"kv_caches": [{"kv": np.zeros((4096, 2, 8))}, {"w": np.zeros((1, 2, 8))}], "block_axis": 1}, "w", "planes"),
]


def test_the_most_that_the_wire_takes() -> None:
    tensors = {"kv": np.zeros((4095, 2, 1)), "w": np.zeros((1, 2, 1))}
    assert len(KVLayout.from_tensors(tensors, block_tokens=16, block_axis=1).groups[0].planes) == MAX_PLANES
    assert len(KVLayout.from_tensors([{"kv": np.zeros((2, 8))}] * 64, block_tokens=16).groups) == MAX_GROUPS
    assert (wire.MAX_GROUPS, wire.MAX_PLANES) == (MAX_GROUPS, MAX_PLANES)


@pytest.mark.parametrize(("settings", "tensor", "field"), REFUSED)
def test_a_refusal_names_the_tensor_and_the_field(settings: dict[str, Any], tensor: str, field: str) -> None:
    arguments = {"kv_caches": {"kv": np.zeros((2, 8))}, "block_tokens": 16, **settings}
    with pytest.raises(InvalidLayout) as caught:
        KVLayout.from_tensors(arguments.pop("kv_caches"), **arguments)
    assert caught.value.fields == {"tensor": tensor, "field": field}
    assert field in str(caught.value)


def test_blocks_must_fill_chunks() -> None:
    layout = layout_of(np.zeros((2, 8)), block_tokens=48)
    with pytest.raises(InvalidLayout) as caught:
        layout.validate_chunk_tokens(256)
    assert caught.value.fields == {"tensor": "kv", "field": "block_tokens"}
    layout.validate_chunk_tokens(96)


@given(st.data())
def test_planes_hold_the_tensors_own_bytes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    whole = np.arange(np.prod(shape), dtype=np.int64).reshape([shape[at] for at in order])
    array = whole.transpose([order.index(at) for at in range(len(shape))])
    memory = whole.tobytes()
    try:
        layout = KVLayout.from_tensors({"kv": array}, block_tokens=1, block_axis=axis)
    except InvalidLayout as error:
        assert error.fields["field"] == "strides"
        return
    indices = list(product(*(range(size) for size in shape[:axis])))
    for index, plane in zip(indices, planes_of(layout), strict=True):
        for block, run in enumerate(blocks_by(plane, memory, 0, shape[axis])):
            stored = np.frombuffer(run, np.int64).reshape([plane.in_block_shape[at] for at in plane.stride_order])
            expected = array[(*index, block)].transpose(plane.stride_order)
            assert np.array_equal(stored, expected)


# The key


def test_the_key_is_what_the_rule_says() -> None:
    layout = layout_of(np.zeros((2, 10, 16, 2, 4), np.float16), block_axis=1, format="fa3")
    packed = msgpack.packb(["float16", "fa3", [[16, [[256, [16, 2, 4], [0, 1, 2]]] * 2]]])
    assert layout.layout_key == hashlib.sha256(packed).digest()


def test_the_key_does_not_know_where_and_how_many() -> None:
    few = KVLayout.from_tensors({"a": np.zeros((64, 16, 4), np.float32)}, block_tokens=16)
    many = KVLayout.from_tensors({"b": np.zeros((200, 32, 4), np.float32)[:, :16]}, block_tokens=16)
    assert few.layout_key == many.layout_key


@pytest.mark.parametrize(
    "other",
    [
        {"kv_caches": {"kv": np.zeros((10, 16, 4), np.int32)}},
        {"kv_caches": {"kv": np.zeros((10, 16, 2, 2), np.float32)}},
        {"kv_caches": {"kv": np.zeros((10, 16, 8), np.float32)}},
        {"kv_caches": {"kv": np.zeros((10, 4, 16), np.float32).transpose(0, 2, 1)}},
        {"kv_caches": {"kv": np.zeros((10, 16, 4), np.float32), "w": np.zeros((10, 16, 4), np.float32)}},
        {"kv_caches": [{"kv": np.zeros((10, 16, 4), np.float32)}] * 2},
        {"block_tokens": 8},
        {"format": "fa3"},
    ],
)
def test_whatever_keeps_workers_from_sharing_is_in_the_key(other: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"kv_caches": {"kv": np.zeros((10, 16, 4), np.float32)}, "block_tokens": 16}
    changed = {**plain, **other}
    ours = KVLayout.from_tensors(plain.pop("kv_caches"), **plain)
    theirs = KVLayout.from_tensors(changed.pop("kv_caches"), **changed)
    assert ours.layout_key != theirs.layout_key
