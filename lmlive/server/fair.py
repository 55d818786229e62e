"""The order in which the works of one lane run.

Not threads: these queues are plain objects, guarded by whoever uses them from several threads (``lanes.Pool`` does).
The rules they keep: works with the same key run one at a time, in the order in which they came; between keys, every
key gets the same share of the cost, however much one of them queues.
"""

import heapq
from collections import deque
from itertools import count
from typing import Final

from lmlive.modules.handler import Work

MIN_COST: Final = 65_536
"""What a work costs at least, in bytes: one that moves nothing still takes a turn."""


class _Flow:
    """The works of one key; ``finish`` is the virtual time at which its share up to now is used up."""

    __slots__ = ("finish", "key", "running", "works")

    def __init__(self, key: object) -> None:
        self.key = key
        self.works: deque[Work] = deque()
        self.finish = 0
        self.running = False


class FairQueue:
    """Works in order per key, fair between keys by cost (start-time fair queueing).

    Virtual time is measured in bytes. A key that comes back after a pause starts at the present, so that it can
    neither save up a share nor lose one; a key that queues a lot is served when the others had as much as it had.
    A work without a key is a flow of its own.
    """

    def __init__(self) -> None:
        self._flows: dict[object, _Flow] = {}
        self._ready: list[tuple[int, int, _Flow]] = []
        self._running: dict[int, _Flow] = {}
        self._resting: list[tuple[int, int, _Flow]] = []
        self._order = count()
        self._now = 0
        self._queued = 0

    def __len__(self) -> int:
        """Count the works that wait."""
        return self._queued

    @property
    def ready(self) -> bool:
        """Whether ``pop`` would give a work now."""
        return bool(self._ready)

    def push(self, work: Work) -> None:
        """Add a work."""
        key = object() if work.key is None else work.key
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow(key)
        flow.works.append(work)
        self._queued += 1
        if len(flow.works) == 1 and not flow.running:
            self._make_ready(flow)

    def pop(self) -> Work | None:
        """Take the work whose turn it is; None if all that wait are behind a running one of their key."""
        if not self._ready:
            return None
        self._now, _, flow = heapq.heappop(self._ready)
        self._forget()
        work = flow.works.popleft()
        self._queued -= 1
        flow.finish = self._now + max(work.cost, MIN_COST)
        flow.running = True
        self._running[id(work)] = flow
        return work

    def done(self, work: Work) -> None:
        """Say that a work given by ``pop`` has ended: the next of its key may run."""
        flow = self._running.pop(id(work))
        flow.running = False
        if flow.works:
            self._make_ready(flow)
        elif not self._ready and not self._running:
            # Nothing waits or runs: virtual time has no meaning until the next work.
            self._flows.clear()
            self._resting.clear()
        else:
            heapq.heappush(self._resting, (flow.finish, next(self._order), flow))

    def clear(self) -> list[Work]:
        """Take out everything that waits, in no order that matters."""
        left = [work for flow in self._flows.values() for work in flow.works]
        for flow in self._flows.values():
            flow.works.clear()
        self._ready.clear()
        self._queued = 0
        return left

    def _make_ready(self, flow: _Flow) -> None:
        start = max(self._now, flow.finish)
        heapq.heappush(self._ready, (start, next(self._order), flow))

    def _forget(self) -> None:
        """Drop the flows that are idle and whose share is used up: coming back, they would start at the present."""
        while self._resting and self._resting[0][0] <= self._now:
            _, _, flow = heapq.heappop(self._resting)
            if not flow.running and not flow.works and flow.finish <= self._now and self._flows.get(flow.key) is flow:
                del self._flows[flow.key]
