import asyncio

import pytest

from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.server.reaper import tick_interval
from tests.conftest import eventually
from tests.modules.registry import BARE
from tests.server.watchman import Watchman


def test_the_tick_is_short_enough_to_notice_a_stall() -> None:
    assert tick_interval(30.0) == 1.0
    assert tick_interval(0.4) == 0.1


def test_silence_beyond_the_budget_is_reaped_at_the_next_scan_and_not_before() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(120)
    assert watch.tracked == 1
    watch.pass_time(30)
    assert watch.tracked == 0
    assert watch.registry.kinds() == ["registered", "suspect", "reaped"]
    assert watch.last_event()["reason"] == "silence"


def test_who_never_pinged_has_the_grace() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.pass_time(3600)
    assert watch.tracked == 1
    watch.pass_time(31)
    assert watch.last_event()["reason"] == "never_pinged"


def test_a_proven_process_is_held_and_said_so_once() -> None:
    watch = Watchman()
    watch.registry.tether()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(300)
    live = watch.books.roster.get(7)
    assert live is not None
    assert live.held
    assert watch.registry.kinds() == ["registered", "suspect", "held"]
    watch.ping()
    assert not live.held


def test_a_transfer_that_runs_is_a_sign_of_life_until_it_ends() -> None:
    watch = Watchman()
    entry = watch.registry.registered()
    watch.ping()
    assert watch.books.entries.borrow(entry.generation) is entry
    watch.pass_time(2000)
    assert watch.tracked == 1
    watch.books.give_back(entry)
    watch.pass_time(120 + 600 + 31)
    assert watch.tracked == 0


def test_warnings_name_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(120)
    warned = [record.getMessage() for record in caplog.records if "silent" in record.getMessage()]
    assert [word for line in warned for word in line.split() if word.startswith("percent")] == [
        "percent=25",
        "percent=50",
        "percent=75",
    ]
    assert all("setting=worker_reap_timeout_seconds" in line for line in warned)


class Target(InstanceLivenessTarget):
    def __init__(self, stale: object) -> None:
        self.stale = stale
        self.asked: list[tuple[float, float]] = []

    def reap_stale_instances(self, reap_timeout_s: float, registration_grace_s: float) -> list[int]:
        self.asked.append((reap_timeout_s, registration_grace_s))
        if isinstance(self.stale, Exception):
            raise self.stale
        return self.stale  # type: ignore[return-value]


def test_what_a_target_calls_stale_is_reaped_and_a_broken_target_spares_nobody() -> None:
    target = Target([7, 99])
    watch = Watchman((Target(RuntimeError("no")), Target(None), target))
    watch.registry.register(**BARE)
    watch.pass_time(30)
    assert target.asked == [(120.0, 3600.0)]
    assert watch.tracked == 0
    assert watch.last_event()["reason"] == "target"


def test_scans_are_due_by_the_last_due_time() -> None:
    watch = Watchman()
    assert watch.reaper.last_scan_age is None
    watch.pass_time(30.3, step=1.01)
    assert watch.reaper.last_scan_age == 0.0
    assert watch.reaper._scan_due == 160.0
    watch.pass_time(2)
    assert watch.reaper.last_scan_age == pytest.approx(2.0)


def test_leases_end_and_the_sweep_is_made_on_each_tick() -> None:
    watch = Watchman()
    watch.books.leases.open(b"owner", {0: {}}, watch.books.moment().running)
    watch.pass_time(59)
    assert len(watch.books.leases) == 1
    watch.pass_time(2)
    assert len(watch.books.leases) == 0
    assert watch.sweeps == 61


async def test_the_task_ticks_and_survives_a_broken_tick(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    watch.reaper.interval = 0.001
    sweeps = watch._sweep
    broken = [RuntimeError("first tick")]

    def sweep() -> None:
        sweeps()
        if broken:
            raise broken.pop()

    watch.reaper._sweep = sweep
    watch.reaper.start()
    await eventually(lambda: watch.sweeps > 2)
    await watch.reaper.stop()
    await watch.reaper.stop()
    seen = watch.sweeps
    await asyncio.sleep(0)
    assert watch.sweeps == seen
    assert "tick failed" in caplog.text


def test_a_warning_names_everything_that_an_operator_needs(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    watch.registry.tether(pid=41)
    watch.registry.register(**BARE)
    live = watch.books.roster.get(7)
    assert live is not None
    live.host = "10.0.0.3"
    watch.ping()
    watch.pass_time(60)
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("silent")]
    assert line == (
        "silent instance_id=7 generation=1 model=m host=10.0.0.3 pid=41 percent=25 silent_for=60.0 budget=120.0 "
        "setting=worker_reap_timeout_seconds"
    )
    suspected = watch.last_event()
    assert (suspected["kind"], suspected["reason"], suspected["host"]) == ("suspect", "silence", "10.0.0.3")


def test_suspicion_is_taken_back_and_comes_again() -> None:
    watch = Watchman()
    watch.registry.register(**BARE)
    watch.ping()
    watch.pass_time(60)
    watch.ping()
    live = watch.books.roster.get(7)
    assert live is not None
    assert not live.suspect
    watch.pass_time(60)
    assert watch.registry.kinds() == ["registered", "suspect", "suspect"]


def test_a_reap_says_why_after_how_long_and_how_often_before(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watchman()
    for _ in range(2):
        watch.registry.register(**BARE)
        watch.ping()
        watch.pass_time(150)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("reaped")]
    assert len(lines) == 2
    assert all("reason=silence" in line and "silent_for=150.0" in line for line in lines)
    assert [line.rpartition(" ")[2] for line in lines] == ["reaped_before=0", "reaped_before=1"]
