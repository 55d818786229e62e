"""Drive whole servers through as many schedules as time allows: ``python -m tests.model.soak``.

Every schedule is a server's whole life on virtual time, and every lot of them follows from one seed, which is printed.
A failure prints the shortest steps that lead to it; ``--seed`` with that seed, and the same ``--lot``, finds it again.
"""

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.pool import Pool
from typing import NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.server_machine import ServerMachine

YEAR = 365.25 * 86_400


class Lot(NamedTuple):
    """What became of some schedules that follow from one seed."""

    seed: int
    schedules: int
    watched: float
    failure: str


def run_lot(seed: int, size: int) -> Lot:
    """Run so many schedules, and shrink the first that fails."""
    counts = [0, 0.0]
    machine = hypothesis.seed(seed)(type("Soaked", (ServerMachine,), {"counts": counts}))
    failure = ""
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=size,
                stateful_step_count=25,
                deadline=None,
                database=None,
                phases=[Phase.generate, Phase.shrink],
                report_multiple_bugs=False,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Exception:  # noqa: BLE001 - whatever it is, it is told with its seed
        failure = traceback.format_exc()
    return Lot(seed, int(counts[0]), counts[1], failure)


def lots(pool: Pool, first: int, schedules: int, size: int) -> Iterator[Lot]:
    """Run lots until there are enough schedules; a few at a time are on their way."""
    seeds = range(first, first + -(-schedules // size))
    yield from pool.imap_unordered(_run, [(seed, size) for seed in seeds])


def _run(arguments: tuple[int, int]) -> Lot:
    return run_lot(*arguments)


def say(text: str) -> None:
    """Tell it at once, also where the output is a file."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the command; 1 where a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--seed", type=int, default=None, help="of the first lot (any)")
    parser.add_argument("--minutes", type=float, default=120.0, help="stop after so many (120)")
    parser.add_argument("--lot", type=int, default=500, help="schedules of one seed (500)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    chosen = parser.parse_args()
    first = chosen.seed if chosen.seed is not None else int.from_bytes(os.urandom(3), "big") * 1000
    lot = min(chosen.lot, chosen.schedules)
    say(f"seeds from {first}, lots of {lot}")
    began = time.monotonic()
    schedules, watched, said = 0, 0.0, 0.0
    # Each process runs a few lots only: what a test framework remembers of them does not add up.
    with multiprocessing.get_context("spawn").Pool(chosen.jobs, maxtasksperchild=8) as pool:
        for done in lots(pool, first, chosen.schedules, lot):
            schedules += done.schedules
            watched += done.watched
            took = time.monotonic() - began
            if done.failure:
                say(done.failure)
                say(f"FAILED: again with --seed {done.seed} --lot {lot} --schedules {lot}")
                return 1
            if took - said >= 10.0 or schedules >= chosen.schedules:
                said = took
                say(
                    f"schedules={schedules} watched_years={watched / YEAR:.3f} seconds={took:.0f} "
                    f"schedules_per_second={schedules / took:.1f} last_seed={done.seed}",
                )
            if took > chosen.minutes * 60:
                say("out of time")
                break
    say(f"passed schedules={schedules} watched_years={watched / YEAR:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
