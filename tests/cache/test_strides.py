from itertools import permutations, product

from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.strides import canonical_order, is_dense, is_separate, stride_order


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [
        sum(index * step for index, step in zip(at, strides, strict=True)) for at in product(*(range(n) for n in shape))
    ]


sizes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(st.data())
def test_dense_means_that_every_address_is_used_once(data: st.DataObject) -> None:
    shape = data.draw(sizes)
    strides = data.draw(st.tuples(*(st.integers(1, 16) for _ in shape)))
    used = addresses(shape, strides)
    assert is_dense(shape, strides, 1) == (sorted(used) == list(range(len(used))))


@given(st.data())
def test_separate_means_that_no_address_is_used_twice(data: st.DataObject) -> None:
    shape = data.draw(sizes)
    strides = data.draw(st.tuples(*(st.integers(0, 16) for _ in shape)))
    used = addresses(shape, strides)
    if is_separate(shape, strides, 1):
        assert len(set(used)) == len(used)


@given(sizes)
def test_axes_of_size_one_do_not_change_the_order(shape: tuple[int, ...]) -> None:
    wide = [axis for axis in range(len(shape)) if shape[axis] > 1]
    for order in permutations(wide):
        strides = [7] * len(shape)
        for step, axis in enumerate(reversed(order)):
            strides[axis] = 10**step
        made = stride_order(shape, strides)
        assert sorted(made) == list(range(len(shape)))
        assert [axis for axis in made if axis in wide] == list(order)
        assert canonical_order(shape, made) == made
    contiguous = [10 ** (len(shape) - axis) for axis in range(len(shape))]
    assert stride_order(shape, contiguous) == tuple(range(len(shape)))
