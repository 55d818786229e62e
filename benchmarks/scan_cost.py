"""What do the roster's scan and touch cost the loop?

Both run on the loop thread for every scan and for every frame, so they are measured bare: no loop, no socket.
Medians over many rounds; of a round's calls the mean, less the empty call's.
"""

import statistics
import timeit
from collections.abc import Callable

from _common import Row, arguments, report

from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Facts, Roster
from lmlive.liveness.watch import Moment, Watch

POLICY = ReapPolicy(timeout=120.0, grace=3600.0, hold=600.0)
SCAN_GOAL_MS = 1.0
TOUCH_GOAL_US = 0.5
BEGIN = Moment(0.0, 0.0)


def roster_of(count: int, *, proven: bool) -> Roster:
    """Make a roster of workers that the kernel shows alive, half of them with a beat unless all are proven."""
    roster = Roster(POLICY)
    for instance_id in range(1, count + 1):
        facts = Facts(
            instance_id=instance_id,
            secret_hash=instance_id.to_bytes(32, "little"),
            fingerprint=b"",
            model="m",
            evidence=Evidence.PROCESS,
            pid=instance_id,
            tether_open=True,
        )
        generation = roster.register(facts, BEGIN).registration.generation
        roster.touch(instance_id, generation, BEGIN, prove=proven or instance_id % 2 == 0)
    return roster


def seconds_each(call: Callable[[], object], number: int, rounds: int) -> float:
    """Give the median over rounds of the mean seconds of one call."""
    return statistics.median(timeit.repeat(call, number=number, repeat=rounds)) / number


def reap_all(count: int, now: Moment) -> float:
    """Give the seconds of the one scan that reaps everybody."""
    roster = roster_of(count, proven=True)
    return timeit.timeit(lambda: roster.scan(now), number=1)


def scans(count: int, rounds: int) -> list[Row]:
    """Measure a scan of healthy workers, and two that come rarely."""
    mixed, silent = roster_of(count, proven=False), roster_of(count, proven=True)
    healthy, late, dead = Moment(9.0, 9.0), Moment(119.0, 119.0), Moment(1e6, 1e6)
    silent.scan(late)  # the warnings are given once; what stays is the cost of each later scan
    usual = seconds_each(lambda: mixed.scan(healthy), 10, rounds)
    suspect = seconds_each(lambda: silent.scan(late), 10, rounds)
    reaping = statistics.median(reap_all(count, dead) for _ in range(3))
    return [
        Row(f"scan of {count:,} registrations", usual * 1e3, "ms", SCAN_GOAL_MS, note="all heard within a beat"),
        Row(f"scan of {count:,} silent ones", suspect * 1e3, "ms", note="all suspect, none over its budget"),
        Row(f"scan that reaps {count:,}", reaping * 1e3, "ms", note="all at once"),
    ]


def touches(count: int, rounds: int) -> list[Row]:
    """Measure a touch by a ping and one by traffic, and the stamp that a batch of frames shares."""
    roster, middle = roster_of(count, proven=True), count // 2
    watch = Watch(1.0)
    watch.advance(0.0, caught_up=True)
    empty = seconds_each(lambda: None, 20_000, rounds)
    now = iter(range(1, 1 << 62))

    def moving() -> Moment:
        tick = float(next(now))
        return Moment(tick, tick)

    base = seconds_each(moving, 20_000, rounds)
    ping = seconds_each(lambda: roster.touch(middle, middle, moving(), prove=True), 20_000, rounds) - base
    traffic = seconds_each(lambda: roster.touch(middle, middle, moving()), 20_000, rounds) - base
    stale = seconds_each(lambda: roster.touch(middle, 0, BEGIN), 20_000, rounds) - empty
    stamp = seconds_each(lambda: watch.moment(0.5), 20_000, rounds) - empty
    return [
        Row("touch by a ping", ping * 1e6, "us", TOUCH_GOAL_US, note="moves last_seen, latches, counts"),
        Row("touch by traffic", traffic * 1e6, "us", TOUCH_GOAL_US, note="moves last_seen"),
        Row("touch by an old generation", stale * 1e6, "us", TOUCH_GOAL_US, note="touches nothing"),
        Row("a moment between two ticks", stamp * 1e6, "us", note="once per batch of frames"),
    ]


def main() -> None:
    """Measure and print."""
    parser = arguments("What do the roster's scan and touch cost the loop?")
    parser.add_argument("--registrations", type=int, default=10_000, help="how many are live (default 10,000)")
    parser.add_argument("--rounds", type=int, default=15, help="medians are over so many (default 15)")
    chosen = parser.parse_args()
    report(
        [*scans(chosen.registrations, chosen.rounds), *touches(chosen.registrations, chosen.rounds)],
        as_json=chosen.json,
    )


if __name__ == "__main__":
    main()
