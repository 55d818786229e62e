"""How often does each rule of silence reap a live worker, and how soon does it see a dead one?

Worker-days are simulated from a seed (or read from a trace): workers and servers that stand still now and then, and
nobody who dies. Whoever is reaped is reaped falsely. The rules see the same heartbeats. lmlive's is the shipped reaper
with its roster and its watch, ticked by a clock that is moved by hand; of the others the textbook's formula.

A false reap's length is the time until the worker's next heartbeat. Detection is from a death at any moment to the
verdict, by silence alone; evidence does not need it (see detection.py).
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from _common import Row, arguments, report
from _heartbeats import (
    BEAT,
    SERVER_STALL,
    SERVER_STALLS_A_DAY,
    Arrivals,
    Floats,
    draw_arrivals,
    draw_stalls,
    read_trace,
)

from lmlive.cache.arena import Arena
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import ChunkStore
from lmlive.config import ServerConfig
from lmlive.device.host import HostBackend
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Facts, Roster
from lmlive.liveness.watch import Watch
from lmlive.modules.books import Books
from lmlive.modules.entries import Entries
from lmlive.server.reaper import Reaper, tick_interval
from lmlive.testing import ManualClock

GOAL: Final = 3e-4
WORKERS: Final = 8  # of one server: its stalls are theirs
DAYS: Final = 4.0  # that a server lives
HISTORY: Final = 1000  # intervals that an adaptive rule learns from
TIMEOUT: Final = 120.0

Patience = Callable[[Arrivals], Floats]
"""Gives for each heartbeat but the last the seconds of silence after it at which its worker is given up."""


class Mistakes(NamedTuple):
    """What one rule did to some worker-days.

    Args:
        lengths: Seconds of each false reap, until the next heartbeat.
        detections: Seconds from each death to the verdict.
    """

    lengths: list[float]
    detections: list[float]


# Rules by formula


def fixed(seconds: float) -> Patience:
    """Give up after so many seconds."""
    return lambda arrivals: np.full(len(arrivals.read) - 1, seconds)


def phi_normal(phi: float, pause: float) -> Patience:
    """Give up once a later heartbeat is as unlikely as 10**-phi, were the intervals normal; plus a pause."""
    z = _upper_quantile(10.0**-phi)

    def patience(arrivals: Arrivals) -> Floats:
        mean, deviation = _history(np.diff(arrivals.read))
        return mean + pause + z * np.maximum(deviation, 0.1)

    return patience


def phi_exponential(phi: float) -> Patience:
    """Give up once a later heartbeat is as unlikely as 10**-phi, were the intervals exponential."""

    def patience(arrivals: Arrivals) -> Floats:
        mean, _ = _history(np.diff(arrivals.read))
        return phi * math.log(10.0) * mean

    return patience


def expected_arrival(margin: float) -> Patience:
    """Give up a margin after the next heartbeat's expected arrival (NFD-E of Chen, Toueg and Aguilera, 2002)."""

    def patience(arrivals: Arrivals) -> Floats:
        offset, _ = _history(arrivals.read[:-1] - BEAT * arrivals.number[:-1], shift=0)
        return np.asarray(offset + BEAT * (arrivals.number[:-1] + 1.0) + margin - arrivals.read[:-1])

    return patience


def _history(values: Floats, shift: int = 1) -> tuple[Floats, Floats]:
    """Give mean and deviation of the values before each one (``shift`` 1), or up to each one (0); a beat at first."""
    known = np.concatenate([[BEAT], values]) if shift else values
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - HISTORY, 0)
    center = float(known[0])  # sums of differences from it lose no digits
    sums = np.concatenate([[0.0], np.cumsum(known - center)])
    squares = np.concatenate([[0.0], np.cumsum((known - center) ** 2)])
    count = ends - begins
    mean = (sums[ends] - sums[begins]) / count
    variance = (squares[ends] - squares[begins]) / count - mean**2
    return mean + center, np.sqrt(np.maximum(variance, 0.0))


def _upper_quantile(chance: float) -> float:
    """Give the z that a standard normal exceeds with this chance."""
    low, high = 0.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(middle / math.sqrt(2.0)) / 2 > chance else (low, middle)
    return high


def judge(patience: Patience, arrivals: Arrivals, deaths: Floats) -> Mistakes:
    """Count what a rule by formula does; its server looks at the clock before it reads what waited."""
    gaps, patient = np.diff(arrivals.read), patience(arrivals)
    false = gaps > patient
    last = _last_before(arrivals, deaths)
    verdicts = arrivals.stalls.delay(arrivals.read[last] + patient[last])
    return Mistakes(list(gaps[false] - patient[false]), list(np.maximum(verdicts - deaths, 0.0)))


def _last_before(arrivals: Arrivals, deaths: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    return np.clip(np.searchsorted(arrivals.read, deaths, side="right") - 1, 0, len(arrivals.read) - 2)


# The shipped rule


class Watchman:
    """The reaper of a server with one worker, from a moment on.

    Args:
        arrivals: What the worker sends.
        last: Number of the heartbeat that was read last.
        lead: How long before that the server began to tick.
        held: Whether the kernel shows the worker alive.
    """

    def __init__(self, arrivals: Arrivals, last: int, lead: float, *, held: bool) -> None:
        self._arrivals = arrivals
        self._begin = float(arrivals.read[last])
        self._clock = ManualClock(self._begin - lead)
        policy = ReapPolicy(timeout=TIMEOUT, grace=3600.0, hold=600.0)
        store = ChunkStore(Arena(1 << 20))
        self._roster = Roster(policy)
        self._books = Books(
            config=ServerConfig(environ={}),
            epoch=1,
            clock=self._clock,
            policy=policy,
            watch=Watch(tick_interval(policy.scan_interval)),
            roster=self._roster,
            entries=Entries(),
            backend=HostBackend(),
            store=store,
            leases=LeaseTable(store, seconds=60.0, token=str),
            later=lambda *_: lambda: None,
            status=lambda: dict,
            discard=lambda _: None,
        )
        self._reaper = Reaper(self._books, self, lambda: None)
        self._tick()
        evidence = Evidence.PROCESS if held else Evidence.NONE
        facts = Facts(instance_id=1, secret_hash=b"1", fingerprint=b"", model="m", evidence=evidence, tether_open=held)
        self._generation = self._roster.register(facts, self._books.moment()).registration.generation

    def take_caught_up(self) -> bool:
        """Tell that what had arrived was read: what waits during a stall is read right after the tick that ends it."""
        return True

    def reaped_by(self, until: float) -> float | None:
        """Tick until then, without another heartbeat; give when the worker was reaped, None if it was not."""
        while self._clock.now() < until:
            self._tick()
            if not self._roster.tracked:
                return self._clock.now()
        return None

    def _tick(self) -> None:
        # The next tick is due an interval after this one; in a stall it comes at its end.
        before = self._clock.now()
        self._reaper.tick()
        due = self._arrivals.stalls.end_of(before + self._reaper.interval)
        if before < self._begin <= due:
            self._clock.advance_to(self._begin)
            self._roster.touch(1, self._generation, self._books.moment(), prove=True)
        self._clock.advance_to(due)


def judge_shipped(arrivals: Arrivals, deaths: Floats, random: np.random.Generator, *, held: bool = False) -> Mistakes:
    """Count what the shipped reaper does; a gap up to the timeout cannot end in a reap, so it is left out."""
    lengths = []
    scan = TIMEOUT / 4
    for last in np.flatnonzero(np.diff(arrivals.read) > TIMEOUT):
        heard = float(arrivals.read[last + 1])
        reaped = Watchman(arrivals, int(last), random.uniform(1.0, scan), held=held).reaped_by(heard)
        if reaped is not None:
            lengths.append(heard - reaped)
    detections = []
    for death, last in zip(deaths, _last_before(arrivals, deaths), strict=True):
        reaped = Watchman(arrivals, int(last), random.uniform(1.0, scan), held=False).reaped_by(math.inf)
        detections.append(max(0.0, (reaped or math.inf) - death))
    return Mistakes(lengths, detections)


RULES: Final[dict[str, Patience]] = {
    "fixed 30 s": fixed(30.0),
    "fixed 40 s": fixed(40.0),
    "fixed 60 s": fixed(60.0),
    "fixed 120 s": fixed(TIMEOUT),
    "phi 8, normal, pause 3 s": phi_normal(8.0, 3.0),
    "phi 12, normal, pause 10 s": phi_normal(12.0, 10.0),
    "phi 8, exponential": phi_exponential(8.0),
    "expected arrival + 20 s": expected_arrival(20.0),
}
SHIPPED: Final = "lmlive, 120 s of watched time"
HELD: Final = "the same, process shown alive"


def simulate(days: float, deaths: int, seed: int) -> Iterable[tuple[Arrivals, Floats]]:
    """Make up worker-days, a server with its workers at a time; and moments at which each might die."""
    random = np.random.default_rng(seed)
    servers = max(1, round(days / WORKERS / DAYS))
    each = days / servers / WORKERS
    for _ in range(servers):
        stalls = draw_stalls(random, each, SERVER_STALLS_A_DAY, SERVER_STALL)
        for _ in range(WORKERS):
            arrivals = draw_arrivals(random, each, stalls)
            share = max(1, round(deaths / servers / WORKERS))
            yield arrivals, random.uniform(arrivals.read[0], arrivals.read[-1], share)


def measure(worker_days: Iterable[tuple[Arrivals, Floats]], seed: int) -> tuple[float, dict[str, Mistakes]]:
    """Show all rules the same heartbeats; give the days and what each rule did."""
    random = np.random.default_rng(seed)
    found = {name: Mistakes([], []) for name in (*RULES, SHIPPED, HELD)}
    seconds = 0.0
    for arrivals, deaths in worker_days:
        seconds += arrivals.seconds
        did = {name: judge(rule, arrivals, deaths) for name, rule in RULES.items()}
        did[SHIPPED] = judge_shipped(arrivals, deaths, random)
        did[HELD] = judge_shipped(arrivals, np.empty(0), random, held=True)
        for name, mistakes in did.items():
            found[name].lengths.extend(mistakes.lengths)
            found[name].detections.extend(mistakes.detections)
    return seconds / 86_400.0, found


def rows(days: float, found: dict[str, Mistakes]) -> list[Row]:
    """Give the figures of each rule."""
    out = []
    for name, mistakes in found.items():
        length = f"{np.mean(mistakes.lengths):.0f} s each" if mistakes.lengths else "none"
        note = f"{len(mistakes.lengths)} in {days:,.0f} worker-days, {length}"
        goal = GOAL if name in {SHIPPED, HELD} else None
        out.append(Row(f"{name}: false reaps", len(mistakes.lengths) / days, "a day", goal, note=note))
        if mistakes.detections:
            middle, late = np.percentile(mistakes.detections, [50, 99])
            note = f"p99 {late:.1f} s, longest {max(mistakes.detections):.1f} s, of {len(mistakes.detections)} deaths"
            out.append(Row(f"{name}: detection, p50", float(middle), "s", note=note))
    return out


def main() -> None:
    """Simulate and print."""
    parser = arguments("How often does each rule of silence reap a live worker, and how soon does it see a dead one?")
    parser.add_argument("--days", type=float, default=3200.0, help="worker-days (default 3,200)")
    parser.add_argument("--deaths", type=int, default=2000, help="deaths for the detection times (default 2,000)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (default 1)")
    parser.add_argument(
        "--trace", type=Path, help="a heartbeat trace in place of the simulation: number, sent, received"
    )
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # the reaper's own
    if chosen.trace is None:
        worker_days = simulate(chosen.days, chosen.deaths, chosen.seed)
    else:
        try:
            arrivals = read_trace(chosen.trace)
        except (OSError, ValueError) as error:
            sys.exit(f"cannot use the trace: {error}")
        deaths = np.random.default_rng(chosen.seed).uniform(arrivals.read[0], arrivals.read[-1], chosen.deaths)
        worker_days = [(arrivals, deaths)]
    report(rows(*measure(worker_days, chosen.seed)), as_json=chosen.json)


if __name__ == "__main__":
    main()
