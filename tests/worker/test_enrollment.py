import pytest

from lmlive.cache.layout import Group, KVLayout, Plane
from lmlive.errors import InvalidLayout
from lmlive.protocol.parts import MAX_AXES, MAX_PLANES
from lmlive.worker.enrollment import check_layout


def layout(planes: int, *, axes: int = 1, dtypes: tuple[str, ...] = ("int8",)) -> KVLayout:
    made = [
        Plane("layer", 8 * number, 8, 8, (1,) * axes, tuple(range(axes)), dtypes[number % len(dtypes)])
        for number in range(planes)
    ]
    return KVLayout((Group(16, 4, tuple(made[: planes // 2])), Group(16, 4, tuple(made[planes // 2 :]))))


def test_what_a_register_can_name_will_do() -> None:
    check_layout(layout(MAX_PLANES, axes=MAX_AXES))
    check_layout(layout(400, dtypes=("int8", "uint8")))


@pytest.mark.parametrize(
    ("wrong", "field", "size", "limit"),
    [
        (layout(MAX_PLANES + 1), "planes", MAX_PLANES + 1, MAX_PLANES),
        (layout(2, axes=MAX_AXES + 1), "in_block_shape", MAX_AXES + 1, MAX_AXES),
        (layout(1000, dtypes=("int8", "uint8")), "kv_dtype", 5499, 4096),
    ],
)
def test_what_no_register_can_name_is_refused(wrong: KVLayout, field: str, size: int, limit: int) -> None:
    with pytest.raises(InvalidLayout) as caught:
        check_layout(wrong)
    assert (caught.value.field, caught.value.size, caught.value.limit) == (field, size, limit)
