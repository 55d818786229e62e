"""What a worker registers, and what other threads see of its registration.

Pure values: made once, replaced as a whole, read from any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lmlive.cache.layout import KVLayout
from lmlive.device.pool_view import PoolView
from lmlive.errors import InvalidLayout
from lmlive.protocol.codec import MAX_TEXT_BYTES
from lmlive.protocol.parts import MAX_AXES, MAX_PLANES
from lmlive.worker.cell import NOWHERE, Cell
from lmlive.worker.hello import ServerFacts
from lmlive.worker.memory import WorkerMemory
from lmlive.worker.ways import Way, ways_of


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
        groups: KV groups as REGISTER takes them where the server copies; empty without a cache.
        own_groups: The same where the worker copies.
        handles: (descriptor, bytes) of its memory.
        mirror_note: What it costs that some of it is only a mirror; empty where none is.
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
    own_groups: Sequence[list[object]] = ()
    handles: Sequence[tuple[int, int]] = field(default=(), repr=False)
    mirror_note: str = ""
    mode: str = "auto"
    strategy: str = "auto"

    def with_memory(self, layout: KVLayout, memory: WorkerMemory) -> "Enrollment":
        """Give the same with a cache."""
        return replace(
            self,
            kv_dtype=layout.kv_dtype,
            format=layout.format,
            groups=memory.groups,
            own_groups=memory.own_groups,
            handles=tuple(memory.handles),
            mirror_note=memory.mirror_note,
        )

    @property
    def ways(self) -> tuple[Way, ...]:
        """How KV may travel, the best way first; none without a cache."""
        if not self.own_groups:
            return ()
        return ways_of(self.mode, self.strategy, mirrored=bool(self.mirror_note))

    def payload(self, way: Way) -> list[object]:
        """Give REGISTER's payload, with the cache or without it."""
        carries_kv, shares = way is not Way.NONE, way is Way.SERVER_DRIVEN
        return [
            self.secret,
            self.model,
            self.revision,
            self.rank,
            self.world_size,
            self.kv_dtype if carries_kv else "",
            self.format if carries_kv else "",
            "engine_driven" if way.copies_itself else way.value,
            way.value if way.copies_itself else self.strategy,
            list(self.groups if shares else self.own_groups if carries_kv else ()),
            [["fd", index, nbytes] for index, (_, nbytes) in enumerate(self.handles)] if shares else [],
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
        way: How KV travels; "none" where the server cannot reach the worker's memory.
        pool: The server's, mapped here, where the worker copies to and from it.
    """

    cell: Cell = NOWHERE
    facts: ServerFacts | None = None
    way: Way = Way.NONE
    pool: PoolView | None = None

    @property
    def carries_kv(self) -> bool:
        """Whether KV travels at all."""
        return self.way is not Way.NONE
