"""What a worker registers, and what other threads see of its registration.

Pure values: made once, replaced as a whole, read from any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lmlive.cache.layout import KVLayout
from lmlive.errors import InvalidLayout
from lmlive.protocol.codec import MAX_TEXT_BYTES
from lmlive.protocol.parts import MAX_AXES, MAX_PLANES
from lmlive.worker.cell import NOWHERE, Cell
from lmlive.worker.hello import ServerFacts
from lmlive.worker.memory import WorkerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrollment:
    """What a worker registers.

    Args:
        instance_id: The instance.
        secret: Proves that a later request is by the same worker.
        model: Name of the model.
        revision: Its weights' revision.
        rank: Which part of the model.
        world_size: How many parts.
        kv_dtype: Element type of the cache.
        format: What its shape cannot show.
        groups: KV groups as REGISTER takes them; empty without a cache.
        handles: (descriptor, bytes) of its memory.
        mode: Who shall copy; "auto" takes what there is, also nothing.
        strategy: How KV shall travel where the engine copies.
    """

    instance_id: int
    secret: bytes
    model: str
    revision: str = ""
    rank: int = 0
    world_size: int = 1
    kv_dtype: str = ""
    format: str = ""
    groups: Sequence[list[object]] = ()
    handles: Sequence[tuple[int, int]] = field(default=(), repr=False)
    mode: str = "auto"
    strategy: str = "auto"

    def with_memory(self, layout: KVLayout, memory: WorkerMemory) -> "Enrollment":
        """Give the same with a cache."""
        return replace(
            self, kv_dtype=layout.kv_dtype, format=layout.format, groups=memory.groups, handles=tuple(memory.handles)
        )

    def payload(self, *, carries_kv: bool) -> list[object]:
        """Give REGISTER's payload, with the cache or without it."""
        return [
            self.secret,
            self.model,
            self.revision,
            self.rank,
            self.world_size,
            self.kv_dtype if carries_kv else "",
            self.format if carries_kv else "",
            "server_driven" if carries_kv else "none",
            self.strategy,
            list(self.groups) if carries_kv else [],
            [["fd", index, nbytes] for index, (_, nbytes) in enumerate(self.handles)] if carries_kv else [],
        ]


def check_layout(layout: KVLayout) -> None:
    """Refuse a layout that no REGISTER can name, before any memory is moved for it.

    Raises:
        InvalidLayout: With the number that is too large, and what is allowed.
    """
    planes = [plane for group in layout.groups for plane in group.planes]
    _check_most("planes", "planes", len(planes), MAX_PLANES)
    _check_most("in_block_shape", "axes after block_axis", max(len(plane.in_block_shape) for plane in planes), MAX_AXES)
    _check_most("kv_dtype", "bytes of dtype names", len(layout.kv_dtype), MAX_TEXT_BYTES)


def _check_most(field: str, what: str, number: int, most: int) -> None:
    if number > most:
        detail = f"the layout has {number} {what}, and a worker can register at most {most}"
        raise InvalidLayout(detail, tensor="", field=field, size=number, limit=most)


class View(NamedTuple):
    """What other threads see of a membership.

    Args:
        cell: The registration.
        facts: What the server told; None before the first HELLO.
        carries_kv: Whether the server can reach the worker's memory.
    """

    cell: Cell = NOWHERE
    facts: ServerFacts | None = None
    carries_kv: bool = False
