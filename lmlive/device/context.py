"""One generation's cache context: its mappings, the layout on them, and the rule that they are closed exactly once.

It is not liveness and not bookkeeping: who may copy, and when to close, is decided elsewhere. Its own rule: nothing is
unmapped while a copy runs, nothing is copied after the close. Lane threads; each method may be called from any of them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from lmlive.device import syscalls
from lmlive.device.backend import (
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
        self._unmapped = False

    @classmethod
    def open(cls, backend: DeviceBackend, sources: Sequence[FdSource], groups: Sequence[GroupPlace]) -> Self:
        """Open every handle and place the layout; may take seconds.

        All descriptors in ``sources`` are closed or owned by a mapping afterwards, also where it fails; a failure
        leaves nothing mapped.

        Raises:
            InvalidHandle: A handle that is too small for its layout, or not safe to map.
            InvalidLayout: A plane that cannot be copied.
            ServerBusy: Workers' memory takes too much of this process already.
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
                syscalls.close_foreign(source.fd)
            for text in _close_all(backend, mappings):
                error.add_note(f"and then: {text}")
            raise

    @property
    def device(self) -> str:
        """The kind of device memory."""
        return self._backend.device

    @property
    def mapped_bytes(self) -> int:
        """How much of the worker's memory is borrowed, mapped or by descriptor; 0 once ``close`` is through.

        A close that hangs or failed leaves it as it was.
        """
        return 0 if self._unmapped else sum(mapping.nbytes for mapping in self._mappings)

    @property
    def closed(self) -> bool:
        """Whether ``close`` has run."""
        return self._closed

    def gather_chunks(self, chunks: Iterable[Chunk], may_continue: MayContinue) -> int:
        """Copy chunks out of the worker's memory, in order.

        Args:
            chunks: What to copy, taken one by one as their turn comes; their ``skip`` does not matter.
            may_continue: Asked before each slice of at most 8 MiB; may be called from this thread only.

        Returns:
            How many of them are complete: all but where ``may_continue`` ended it early, in which case the next one's
            memory holds no chunk.

        Raises:
            InternalError: The context is closed.
            InvalidBlocks: A block id outside the layout.
            InvalidHandle: The peer took its memory away.
        """
        return self._copy_all(self._backend.gather, chunks, may_continue)

    def scatter_chunks(self, chunks: Iterable[Chunk], may_continue: MayContinue) -> int:
        """Copy chunks into the worker's memory, but for the blocks they skip; like ``gather_chunks`` otherwise."""
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
        self._unmapped = True

    def _copy_all(
        self,
        copy: Callable[[Placement, Chunk, MayContinue], bool],
        chunks: Iterable[Chunk],
        may_continue: MayContinue,
    ) -> int:
        done = 0
        with self._borrowed():
            for chunk in chunks:
                if not copy(self._placement, chunk, may_continue):
                    break
                done += 1
        return done

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
