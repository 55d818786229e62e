"""How soon is a dead worker reaped?

From the moment at which the kernel tells a third process of the exit, by a pidfd of its own, to the time that the
server's event of the reap bears; both are CLOCK_MONOTONIC. The two are told at the same moment, so a server that is
scheduled first is ahead of the stamp by some tens of microseconds: then the figure is negative. By silence it is from
the last PING, in multiples of the timeout, which is short here; the rule has no other scale.
"""

import random
import time

import numpy as np
from _common import Row, arguments, report
from _light import Connection, LightWorkers, light_server

P50_GOAL_MS = 3.0
P99_GOAL_MS = 20.0
AT_ONCE_GOAL_MS = 250.0
TIMEOUT = 2.0
SPACING = 0.01


def one_by_one(deaths: int) -> list[Row]:
    """Kill one worker after the other."""
    with light_server() as url, LightWorkers(url, deaths) as workers, Connection(url) as connection:
        for worker in workers.all:
            connection.register(worker)
        for worker in workers.all:
            workers.kill(worker)
            time.sleep(SPACING)  # each its own death
        exits, reaps = workers.exits(deaths), connection.reaps(deaths, 10.0)
    waits = _waits(exits, reaps)
    note = f"one at a time, {len(waits)} of {deaths}"
    return [
        Row("kernel exit -> reaped, p50", _percentile(waits, 50), "ms", P50_GOAL_MS, note=note),
        Row("kernel exit -> reaped, p99", _percentile(waits, 99), "ms", P99_GOAL_MS, note=note),
        Row("kernel exit -> reaped, longest", _percentile(waits, 100), "ms", note=note),
    ]


def at_once(deaths: int) -> list[Row]:
    """Kill all at once."""
    with light_server() as url, LightWorkers(url, deaths) as workers, Connection(url) as connection:
        for worker in workers.all:
            connection.register(worker)
        begin = time.monotonic()
        for worker in workers.all:
            workers.kill(worker)
        killed = time.monotonic()
        exits, reaps = workers.exits(deaths), connection.reaps(deaths, 20.0)
    waits = _waits(exits, reaps)
    last_exit, last_reap = max(exits.values()), max(reaps.values(), default=float("nan"))
    note = f"{len(waits)} of {deaths:,} at once; killing them took {(killed - begin) * 1e3:.0f} ms"
    told = f"the last exit was told {(last_exit - begin) * 1e3:.0f} ms after the first kill"
    whole = (last_reap - begin) * 1e3 if len(waits) == deaths else None
    return [
        Row(f"first kill -> all {deaths:,} reaped", whole, "ms", AT_ONCE_GOAL_MS, note=note),
        Row("last kernel exit -> last reaped", (last_reap - last_exit) * 1e3, "ms", note=told),
        Row("kernel exit -> reaped, p50, all at once", _percentile(waits, 50), "ms"),
        Row("kernel exit -> reaped, p99, all at once", _percentile(waits, 99), "ms"),
    ]


def by_silence(deaths: int) -> list[Row]:
    """Kill workers that the kernel is not asked about, each right after a PING."""
    flags = ["--no-evidence", "--worker-reap-timeout-seconds", str(TIMEOUT)]
    pings: dict[int, float] = {}
    with light_server(*flags) as url, LightWorkers(url, deaths) as workers, Connection(url) as connection:
        for worker in workers.all:
            connection.register(worker)
        generations = connection.generations()
        for worker in workers.all:
            time.sleep(random.uniform(0.0, TIMEOUT / 4 * 2 / deaths))  # noqa: S311 - at any moment between two scans
            pings[worker.instance_id] = time.monotonic()
            connection.ping(worker, generations[worker.instance_id])
            workers.kill(worker)
        reaps = connection.reaps(deaths, 5 * TIMEOUT)
    waits = [(reaps[one] - pings[one]) / TIMEOUT for one in reaps]
    note = f"{len(waits)} of {deaths}; LMCache 0.5.6 was seen to take 33 s at its shortest timeout, 30 s"
    bound = 1.25 + 1 / 16  # a scan comes every quarter, on a tick, which is a quarter of that
    return [
        Row("last PING -> reaped by silence, p50", _percentile(waits, 50, 1.0), "timeouts", note=note),
        Row("last PING -> reaped by silence, longest", _percentile(waits, 100, 1.0), "timeouts", bound),
        Row("last PING -> reaped by silence, shortest", _percentile(waits, 0, 1.0), "timeouts", 1.0, at_least=True),
    ]


def _waits(exits: dict[int, float], reaps: dict[int, float]) -> list[float]:
    return [reaps[one] - exits[one] for one in exits if one in reaps]


def _percentile(waits: list[float], percent: float, scale: float = 1e3) -> float | None:
    return float(np.percentile(waits, percent)) * scale if waits else None


def main() -> None:
    """Measure and print."""
    parser = arguments("How soon is a dead worker reaped?")
    parser.add_argument("--deaths", type=int, default=300, help="one at a time, and by silence a third (default 300)")
    parser.add_argument("--at-once", type=int, default=1000, help="all at once (default 1,000)")
    chosen = parser.parse_args()
    rows = [*one_by_one(chosen.deaths), *at_once(chosen.at_once), *by_silence(max(1, chosen.deaths // 3))]
    report(rows, as_json=chosen.json)


if __name__ == "__main__":
    main()
