"""A device in memory that writes down what was opened and closed, and fails or hangs where a test says so."""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import numpy as np

from lmlive.device.backend import Bytes, Chunk, FdSource, GroupPlace, Mapping, MayContinue, Placement
from lmlive.errors import InternalError, InvalidHandle
from lmlive.testing.gate import Gate

Step = Literal["open", "close", "place", "gather", "scatter", "fence"]
"""What a backend is asked to do."""


@dataclass(slots=True, eq=False)
class RecordedMapping:
    """A mapping of memory that is nobody's.

    Args:
        number: Its place in the order of opening, from 1.
        nbytes: Its size.
        memory: Its bytes; a test may read and write them.
    """

    number: int
    nbytes: int
    memory: Bytes = field(repr=False)
    open: bool = True


class RecordedPlacement(NamedTuple):
    """A layout on recorded mappings."""

    groups: tuple[GroupPlace, ...]
    mappings: tuple[RecordedMapping, ...]


class Entry(NamedTuple):
    """One line of the ledger."""

    step: Step
    mapping: int
    """Its number; 0 for steps that are about more than one."""


class RecordingBackend:
    """A ``DeviceBackend`` of plain memory with a ledger.

    Any thread may call it; a test reads the ledger when the threads are quiet.
    """

    device = "host"

    def __init__(self) -> None:
        self.ledger: list[Entry] = []
        self.mappings: list[RecordedMapping] = []
        self._failures: dict[Step, deque[BaseException]] = {}
        self._gates: dict[Step, Gate] = {}
        self._numbering = threading.Lock()

    def __repr__(self) -> str:
        """Sum the ledger up."""
        steps = " ".join(f"{step}={n}" for step, n in Counter(entry.step for entry in self.ledger).items())
        return f"<RecordingBackend {steps or 'unused'}>"

    @property
    def opened(self) -> int:
        """How many mappings were opened."""
        return len(self.mappings)

    @property
    def closed(self) -> int:
        """How many of them were closed."""
        return sum(not mapping.open for mapping in self.mappings)

    @property
    def still_open(self) -> list[RecordedMapping]:
        """Those that were not closed."""
        return [mapping for mapping in self.mappings if mapping.open]

    def fail(self, step: Step, error: BaseException, times: int = 1) -> None:
        """Let the next ``times`` calls of a step raise."""
        self._failures.setdefault(step, deque()).extend([error] * times)

    def gate(self, step: Step) -> Gate:
        """Let calls of a step wait until the gate that this gives is opened."""
        gate = self._gates[step] = Gate()
        return gate

    def open_handle(self, source: FdSource) -> RecordedMapping:
        """Make memory of the size that was asked for; a descriptor is closed."""
        if source.fd >= 0:
            os.close(source.fd)
        self._step("open")
        with self._numbering:
            mapping = RecordedMapping(len(self.mappings) + 1, source.nbytes, np.zeros(source.nbytes, dtype=np.uint8))
            self.mappings.append(mapping)
        self.ledger.append(Entry("open", mapping.number))
        return mapping

    def close_mapping(self, mapping: Mapping) -> None:
        """Write down that it was closed; twice is an ``InternalError``."""
        recorded = cast("RecordedMapping", mapping)
        self._step("close")
        if not recorded.open:
            raise InternalError(f"mapping {recorded.number} was closed twice")
        recorded.open = False
        self.ledger.append(Entry("close", recorded.number))

    def place(self, mappings: Sequence[Mapping], groups: Sequence[GroupPlace]) -> RecordedPlacement:
        """Check that every plane lies within its mapping."""
        self._step("place")
        for group in groups:
            for plane in group.planes:
                end = plane.offset + (group.num_blocks - 1) * plane.stride + plane.run
                if plane.handle >= len(mappings) or end > mappings[plane.handle].nbytes:
                    raise InvalidHandle("the plane ends outside of its handle", handle=plane.handle, end=end)
        self.ledger.append(Entry("place", 0))
        return RecordedPlacement(tuple(groups), tuple(cast("Sequence[RecordedMapping]", mappings)))

    def gather(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk's blocks into its memory."""
        self._step("gather")

        def copy(block: Bytes, piece: Bytes) -> None:
            piece[:] = block

        return self._copy("gather", placement, chunk, may_continue, copy)

    def scatter(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        """Copy a chunk's memory into its blocks."""
        self._step("scatter")

        def copy(block: Bytes, piece: Bytes) -> None:
            block[:] = piece

        return self._copy("scatter", placement, chunk, may_continue, copy)

    def fence(self, placement: Placement) -> None:
        """Nothing runs on: copies are done when they return."""
        del placement
        self._step("fence")
        self.ledger.append(Entry("fence", 0))

    def _copy(
        self,
        step: Step,
        placement: Placement,
        chunk: Chunk,
        may_continue: MayContinue,
        copy: Callable[[Bytes, Bytes], None],
    ) -> bool:
        recorded = cast("RecordedPlacement", placement)
        skips = chunk.skip or [0] * len(recorded.groups)
        at = 0
        for group, blocks, skip in zip(recorded.groups, chunk.blocks, skips, strict=True):
            for plane in group.planes:
                if not may_continue():
                    return False
                mapping = recorded.mappings[plane.handle]
                if not mapping.open:
                    raise InternalError(f"mapping {mapping.number} was copied after its close")
                for index, number in enumerate(blocks):
                    start = plane.offset + int(number) * plane.stride
                    if step == "gather" or index >= skip:
                        copy(mapping.memory[start : start + plane.run], chunk.memory[at : at + plane.run])
                    at += plane.run
        self.ledger.append(Entry(step, 0))
        return True

    def _step(self, step: Step) -> None:
        gate = self._gates.get(step)
        if gate is not None:
            gate.pass_through()
        failures = self._failures.get(step)
        if failures:
            raise failures.popleft()
