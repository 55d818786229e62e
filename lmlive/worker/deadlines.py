"""Which request is due when: a heap whose entries are left behind when their request ends, and swept in time.

Pure: time is an argument. It never holds more than a small multiple of the live requests, however short they live.
"""

import heapq
from collections.abc import Container


class Deadlines:
    """Due times of requests by number; a request may have several."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Count the entries, those of ended requests included."""
        return len(self._heap)

    @property
    def next(self) -> float:
        """The earliest due time; infinity where there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def push(self, due: float, request_id: int) -> None:
        """Add a due time."""
        heapq.heappush(self._heap, (due, request_id))

    def pop(self, now: float) -> list[int]:
        """Take out and name everything that is due, earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            found.append(heapq.heappop(self._heap)[1])
        return found

    def sweep(self, live: Container[int], count: int) -> None:
        """Drop the entries of requests that are not live, once they outnumber the ``count`` live ones."""
        if len(self._heap) > 64 + 2 * count:
            self._heap = [item for item in self._heap if item[1] in live]
            heapq.heapify(self._heap)

    def clear(self) -> None:
        """Drop everything."""
        self._heap.clear()
