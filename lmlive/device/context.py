"""One generation's cache context: its mappings, the layout on them, and the rule that they are closed exactly once.

It is not liveness and not bookkeeping: who may copy, and when to close, is decided elsewhere. Its own rule: nothing is
unmapped while a copy runs, nothing is copied after the close. Lane threads; each method may be called from any of them.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from lmlive.device.backend import (
    BlockIds,
    Bytes,
    Chunk,
    DeviceBackend,
    FdSource,
    GroupPlace,
    Mapping,
    MayContinue,
    Placement,
)
from lmlive.errors import HandleCloseError, InternalError


class CacheContext:
    """The opened mappings of one generation.

    **Lifecycle**: made by ``open`` (or from mappings that are its own from then on), ended by ``close``.

    **Concurrency**: copies may run in several threads at once; ``close`` refuses while one runs.

    Args:
        backend: Copies and unmaps.
        mappings: One per handle, in the order of the handles.
        groups: Where the planes lie.
    """

    def __init__(self, backend: DeviceBackend, mappings: Sequence[Mapping], groups: Sequence[GroupPlace]) -> None:
        self._backend = backend
        self._mappings = tuple(mappings)
        self._placement = backend.place(self._mappings, groups)
        self._lock = threading.Lock()
        self._copies = 0
        self._closed = False

    @classmethod
    def open(cls, backend: DeviceBackend, sources: Sequence[FdSource], groups: Sequence[GroupPlace]) -> Self:
        """Open every handle and place the layout; may take seconds.

        All descriptors in ``sources`` are closed or owned by a mapping afterwards, also where it fails; a failure
        leaves nothing mapped.

        Raises:
            InvalidHandle: A handle that is too small for its layout, or not safe to map.
            InvalidLayout: A plane that cannot be copied.
            HandleOpenError: The system refuses a mapping.
        """
        mappings: list[Mapping] = []
        waiting = list(sources)
        try:
            while waiting:
                mappings.append(backend.open_handle(waiting.pop(0)))
            return cls(backend, mappings, groups)
        except BaseException as error:
            for source in waiting:
                os.close(source.fd)
            for text in _close_all(backend, mappings):
                error.add_note(f"and then: {text}")
            raise

    @property
    def device(self) -> str:
        """The kind of device memory."""
        return self._backend.device

    @property
    def mapped_bytes(self) -> int:
        """How much of the worker's memory is mapped; 0 once closed."""
        return 0 if self._closed else sum(mapping.nbytes for mapping in self._mappings)

    @property
    def closed(self) -> bool:
        """Whether ``close`` has run."""
        return self._closed

    def gather_chunk(self, blocks: Sequence[BlockIds], out: Bytes, may_continue: MayContinue) -> bool:
        """Copy one chunk out of the worker's memory.

        Args:
            blocks: Block ids of the chunk, per group.
            out: The chunk's bytes: group after group, plane after plane, block after block.
            may_continue: Asked before each slice of at most 8 MiB; may be called from this thread only.

        Returns:
            False where ``may_continue`` ended it early; ``out`` then holds no chunk.

        Raises:
            InternalError: The context is closed.
            InvalidBlocks: A block id outside the layout.
            InvalidHandle: The peer took its memory away.
        """
        with self._borrowed():
            return self._backend.gather(self._placement, Chunk(blocks, out), may_continue)

    def scatter_chunk(
        self,
        blocks: Sequence[BlockIds],
        source: Bytes,
        may_continue: MayContinue,
        skip_blocks: Sequence[int] = (),
    ) -> bool:
        """Copy one chunk into the worker's memory; like ``gather_chunk`` otherwise.

        Args:
            blocks: Block ids of the chunk, per group.
            source: The chunk's bytes.
            may_continue: Asked before each slice.
            skip_blocks: Per group, how many of the first blocks are not written; their ids are not looked at.
        """
        with self._borrowed():
            return self._backend.scatter(self._placement, Chunk(blocks, source, skip_blocks), may_continue)

    def gather_chunks(self, chunks: Sequence[Chunk], may_continue: MayContinue) -> int:
        """Copy several chunks out, in order; give how many of them are complete."""
        return self._copy_all(self._backend.gather, chunks, may_continue)

    def scatter_chunks(self, chunks: Sequence[Chunk], may_continue: MayContinue) -> int:
        """Copy several chunks in, in order; give how many of them are complete."""
        return self._copy_all(self._backend.scatter, chunks, may_continue)

    def close(self) -> None:
        """Fence and unmap everything, once; later calls do nothing. May hang in a driver.

        Raises:
            InternalError: A copy is running; nothing was closed.
            HandleCloseError: Some mappings could not be closed; field ``failures`` says which. All were tried.
        """
        with self._lock:
            if self._closed:
                return
            if self._copies:
                raise InternalError("a cache context was closed under a copy", copies=self._copies)
            self._closed = True
        failures = []
        try:
            self._backend.fence(self._placement)
        except Exception as error:  # noqa: BLE001 - one failure never spares the rest
            failures.append(f"fence: {error!r}")
        failures += _close_all(self._backend, self._mappings)
        if failures:
            raise HandleCloseError(
                f"{len(failures)} of {len(self._mappings)} mappings could not be closed, see failures",
                failures=failures,
            )

    def _copy_all(
        self,
        copy: Callable[[Placement, Chunk, MayContinue], bool],
        chunks: Sequence[Chunk],
        may_continue: MayContinue,
    ) -> int:
        with self._borrowed():
            for done, chunk in enumerate(chunks):
                if not copy(self._placement, chunk, may_continue):
                    return done
        return len(chunks)

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise InternalError("a copy was asked of a closed cache context")
            self._copies += 1
        try:
            yield
        finally:
            with self._lock:
                self._copies -= 1


def _close_all(backend: DeviceBackend, mappings: Sequence[Mapping]) -> list[str]:
    failures = []
    for index, mapping in enumerate(mappings):
        try:
            backend.close_mapping(mapping)
        except Exception as error:  # noqa: BLE001 - each mapping is tried, whatever became of the others
            failures.append(f"mapping {index}: {error!r}")
    return failures
