"""What shape and strides say about memory: whether elements lie apart, whether axes fill one run, and in which order.

Pure functions on integers; strides and item sizes are in bytes.
"""

from collections.abc import Sequence


def is_separate(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Tell whether the elements lie apart: each axis steps over all that the axes of smaller stride span."""
    span = itemsize
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step < span:
                return False
            span += step * (size - 1)
    return True


def is_dense(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Tell whether the axes, in some order, fill one run without holes; axes of size 1 are free."""
    expected = itemsize
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def stride_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Give the axes by falling stride."""
    axes = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    return canonical_order(shape, axes)


def canonical_order(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Put axes of size 1, whose stride means nothing, before their right neighbour, so that equal bytes get one key."""
    placed = [axis for axis in order if shape[axis] > 1]
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            placed.insert(placed.index(axis + 1) if axis + 1 < len(shape) else len(placed), axis)
    return tuple(placed)
