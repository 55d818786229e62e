from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.layout import KVLayout, Plane
from lmlive.errors import InvalidHandle, InvalidLayout


def planes_of(layout: KVLayout) -> tuple[Plane, ...]:
    return layout.groups[0].planes


def test_the_server_makes_the_same_layout() -> None:
    tensors = {"a": np.zeros((10, 16, 1, 4), np.float32), "b": np.zeros((2, 10, 16, 4), np.float16)}
    ours = KVLayout.from_tensors(tensors, block_tokens=16, block_axis={"a": 0, "b": 1}, format="x")
    described = msgpack.unpackb(msgpack.packb(ours.wire_groups([(1, 640, 256), (0, 0, 128), (0, 1280, 128)])))
    theirs = KVLayout.from_wire(described, kv_dtype=ours.kv_dtype, format="x", handle_bytes=[2560, 3200])
    assert theirs.layout_key == ours.layout_key
    assert [(plane.handle, plane.offset, plane.stride, plane.run) for plane in theirs.groups[0].planes] == [
        (1, 640, 256, 256),
        (0, 0, 128, 128),
        (0, 1280, 128, 128),
    ]


def test_one_block_has_a_free_stride() -> None:
    layout = KVLayout.from_wire(
        [(16, 1, [(0, 8, 0, 64, (8,), (0,))])], kv_dtype="float64", format="", handle_bytes=[72]
    )
    assert planes_of(layout)[0].stride == 64


def test_the_order_of_axes_of_size_one_does_not_matter() -> None:
    keys = {
        KVLayout.from_wire(
            [(16, 1, [(0, 0, 64, 64, (1, 8, 1), order)])], kv_dtype="float64", format="", handle_bytes=[64]
        ).layout_key
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))
    }
    assert len(keys) == 1


def test_dtypes_that_are_all_the_same_are_one() -> None:
    plane = (0, 0, 64, 64, (8,), (0,))
    keys = {
        KVLayout.from_wire([(16, 1, [plane, plane])], kv_dtype=kv_dtype, format="", handle_bytes=[64]).layout_key
        for kv_dtype in ("float64", "float64,float64")
    }
    assert len(keys) == 1


def wire(at: Sequence[int | str], value: object) -> dict[str, Any]:
    """Give a good description with one thing changed."""
    message: dict[str, Any] = {
        "groups": [[16, 4, [[0, 64, 128, 64, [2, 4], [0, 1]]]]],
        "kv_dtype": "float64",
        "format": "",
        "handle_bytes": [64 + 3 * 128 + 64],
    }
    place: Any = message
    for step in at[:-1]:
        place = place[step]
    place[at[-1]] = value
    return message


PLANE = ("groups", 0, 2, 0)

REFUSED_LAYOUTS: list[tuple[Sequence[int | str], object, str, str]] = [
    (("groups",), [], "", "groups"),
    (("groups",), [[16, 4, [[0, 0, 64, 64, [8], [0]]]]] * 65, "", "groups"),
    (("format",), "x" * 1025, "", "format"),
    (("format",), None, "", "format"),
    (("kv_dtype",), "", "", "kv_dtype"),
    (("kv_dtype",), "torch.float64", "", "kv_dtype"),
    (("kv_dtype",), "float64,float64", "", "kv_dtype"),
    (("kv_dtype",), "x" * 65, "", "kv_dtype"),
    (("groups", 0, 0), 0, "group 0", "block_tokens"),
    (("groups", 0, 0), True, "group 0", "block_tokens"),
    (("groups", 0, 1), 0, "group 0", "num_blocks"),
    (("groups", 0, 1), 2**32 + 1, "group 0", "num_blocks"),
    (("groups", 0, 2), [], "group 0", "planes"),
    ((*PLANE, 1), -1, "group 0 plane 0", "offset"),
    ((*PLANE, 1), 2**63, "group 0 plane 0", "offset"),
    ((*PLANE, 1), 1.0, "group 0 plane 0", "offset"),
    ((*PLANE, 1), 4, "group 0 plane 0", "offset"),
    ((*PLANE, 2), 132, "group 0 plane 0", "stride"),
    ((*PLANE, 2), -8, "group 0 plane 0", "stride"),
    ((*PLANE, 2), 2**63, "group 0 plane 0", "stride"),
    ((*PLANE, 2), 56, "group 0 plane 0", "stride"),
    ((*PLANE, 3), 0, "group 0 plane 0", "run"),
    ((*PLANE, 3), 60, "group 0 plane 0", "run"),
    ((*PLANE, 3), -64, "group 0 plane 0", "run"),
    ((*PLANE, 4), [3, 4], "group 0 plane 0", "in_block_shape"),
    ((*PLANE, 4), [0, 4], "group 0 plane 0", "in_block_shape"),
    ((*PLANE, 4), [1] * 33, "group 0 plane 0", "in_block_shape"),
    ((*PLANE, 5), [0], "group 0 plane 0", "stride_order"),
    ((*PLANE, 5), [1, 1], "group 0 plane 0", "stride_order"),
    ((*PLANE, 5), [1, 2], "group 0 plane 0", "stride_order"),
]


@pytest.mark.parametrize(("at", "value", "tensor", "field"), REFUSED_LAYOUTS)
def test_a_peers_layout_is_checked(at: Sequence[int | str], value: object, tensor: str, field: str) -> None:
    with pytest.raises(InvalidLayout) as caught:
        KVLayout.from_wire(**wire(at, value))
    assert caught.value.fields == {"tensor": tensor, "field": field}


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ((*PLANE, 0), 1),
        ((*PLANE, 0), -1),
        ((*PLANE, 0), False),
        (("handle_bytes",), []),
        (("handle_bytes", 0), 511),
        ((*PLANE, 1), 72),
        ((*PLANE, 1), 2**63 - 8),
        ((*PLANE, 2), 2**63 - 8),
        ((*PLANE, 2), 136),
        ((*PLANE, 3), 72),
        (("groups", 0, 1), 2**32),
    ],
)
def test_a_plane_outside_its_handle_is_refused(at: Sequence[int | str], value: object) -> None:
    message = wire(at, value)
    message["groups"][0][2][0][4:] = [[], []]
    with pytest.raises(InvalidHandle) as caught:
        KVLayout.from_wire(**message)
    assert caught.value.fields["tensor"] == "group 0 plane 0"


def test_a_plane_may_end_where_its_handle_ends() -> None:
    KVLayout.from_wire(**wire(("handle_bytes", 0), 512))


WIRE_INTS = st.one_of(st.integers(-2, 70), st.integers(2**31 - 2, 2**33), st.integers(2**62, 2**64), st.booleans())


@given(
    st.lists(
        st.tuples(
            WIRE_INTS,
            WIRE_INTS,
            st.lists(st.tuples(*[WIRE_INTS] * 4, st.lists(WIRE_INTS, max_size=3), st.lists(WIRE_INTS, max_size=3))),
        ),
        max_size=2,
    ),
    st.lists(st.integers(0, 2**40), max_size=2),
)
def test_whatever_comes_is_a_sound_layout_or_refused(groups: list[Any], handle_bytes: list[int]) -> None:
    try:
        layout = KVLayout.from_wire(groups, kv_dtype="float32", format="", handle_bytes=handle_bytes)
    except (InvalidLayout, InvalidHandle):
        return
    for group in layout.groups:
        for plane in group.planes:
            last = plane.offset + (group.num_blocks - 1) * plane.stride
            assert 0 <= plane.offset <= last
            assert last + plane.run <= handle_bytes[plane.handle]
    assert len(layout.layout_key) == 32
