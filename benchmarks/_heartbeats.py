"""Heartbeats as they arrive: made up from a seed, or read from a trace.

A worker sends one every ten seconds, unless it is stalled: then at the stall's end, and one only. A server reads what
arrives, unless it is stalled: then at the stall's end. Stalls are drawn as production shows them, many short and few
long (Pareto); the figures are those of the sizes below, and no worker ever dies here: whoever is reaped is reaped
falsely.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BEAT = 10.0
DAY = 86_400.0

WORKER_STALLS_A_DAY = 4 * 24.0
WORKER_STALL = (0.5, 1.1, 110.0)
"""Seconds at least, shape, seconds at most: what garbage collection, paging and a held GIL do to a process."""
SERVER_STALLS_A_DAY = 0.5
SERVER_STALL = (5.0, 1.0, 300.0)


class Stalls(NamedTuple):
    """When somebody stood still.

    Args:
        begin: Seconds, rising.
        end: Seconds; of each stall after its begin and before the next one's.
    """

    begin: Floats
    end: Floats

    def delay(self, times: Floats) -> Floats:
        """Give when what happens at these times is done: at once, or at the end of the stall that it falls into."""
        if not len(self.begin):
            return times
        at = np.searchsorted(self.begin, times, side="right") - 1
        inside = (at >= 0) & (times < self.end[at])
        return np.where(inside, self.end[at], times)

    def end_of(self, time: float) -> float:
        """Give the end of the stall that a time falls into; the time itself if it falls into none."""
        return float(self.delay(np.array([time]))[0])


class Arrivals(NamedTuple):
    """The heartbeats of one worker, as its server read them.

    Args:
        number: Of each beat, counted by the worker; what a stall swallowed is missing.
        read: When each was read, in seconds, rising.
        stalls: The server's.
        seconds: How long it was watched.
    """

    number: Floats
    read: Floats
    stalls: Stalls
    seconds: float


def draw_stalls(random: np.random.Generator, days: float, a_day: float, size: tuple[float, float, float]) -> Stalls:
    """Draw stalls at any time, with a length of the Pareto kind that is cut off at the most."""
    least, shape, most = size
    count = random.poisson(a_day * days)
    begin = np.sort(random.uniform(0.0, days * DAY, count))
    length = np.minimum(least * (1.0 + random.pareto(shape, count)), most)
    # One that would begin within another begins at its end.
    end = begin + length
    for at in range(1, count):
        if begin[at] < end[at - 1]:
            begin[at] = end[at - 1]
            end[at] = begin[at] + length[at]
    return Stalls(begin, end)


def draw_arrivals(random: np.random.Generator, days: float, stalls: Stalls) -> Arrivals:
    """Draw one worker's heartbeats, under a server with these stalls."""
    due = random.uniform(0.0, BEAT) + np.arange(0.0, days * DAY, BEAT)
    sent = draw_stalls(random, days, WORKER_STALLS_A_DAY, WORKER_STALL).delay(due)
    kept = np.append(np.diff(sent) > 0.0, True)  # of those that a stall swallowed, the last one
    number = np.flatnonzero(kept).astype(np.float64)
    return Arrivals(number, stalls.delay(sent[kept]), stalls, days * DAY)


def read_trace(path: Path) -> Arrivals:
    """Read a heartbeat trace and stretch it to our beat.

    Args:
        path: A text file; of each line that begins with a number: sequence number, seconds sent, seconds received.

    Raises:
        ValueError: It has fewer than two such lines.
    """
    rows = [line.split()[:3] for line in path.read_text().splitlines() if line.strip()[:1].isdigit()]
    found = np.array([[float(word) for word in row] for row in rows if len(row) == 3], dtype=np.float64)
    if len(found) < 2:
        raise ValueError(f"{path} has no two lines of: number, seconds sent, seconds received")
    found = found[np.argsort(found[:, 2], kind="stable")]
    scale = BEAT / float(np.median(np.diff(np.sort(found[:, 1]))))
    read = (found[:, 2] - found[0, 2]) * scale
    return Arrivals(found[:, 0] - found[0, 0], read, Stalls(np.empty(0), np.empty(0)), float(read[-1]))
