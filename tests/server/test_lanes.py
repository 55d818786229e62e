"""The threads of a server: order, isolation, and that every work settles."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lmlive.errors import ServerDraining, StartError
from lmlive.modules.handler import Lane, Work
from lmlive.server import lanes
from lmlive.server.lanes import Lanes
from lmlive.testing import Gate
from tests.conftest import eventually

Settled = tuple[object | None, BaseException | None]


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


class Bench:
    """Lanes, and what became of the works that were put into them."""

    def __init__(self, **threads: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.lanes = Lanes(self.loop, **threads)
        self.settled: dict[object, list[Settled]] = {}
        self.order: list[object] = []
        self.ran: list[object] = []
        self.gates: list[Gate] = []

    def submit(
        self, name: object, run: Callable[[], object] | None = None, lane: Lane = Lane.TRANSFER, **rest: Any
    ) -> None:
        def noted() -> object:
            self.ran.append(name)
            return None if run is None else run()

        def settle(result: object | None, error: BaseException | None) -> None:
            assert asyncio.get_running_loop() is self.loop
            self.settled.setdefault(name, []).append((result, error))
            self.order.append(name)

        self.lanes.submit(Work(lane, noted, settle, **rest))

    def gate(self) -> Gate:
        gate = Gate()
        self.gates.append(gate)
        return gate

    async def all_settled(self, count: int) -> None:
        await eventually(lambda: len(self.order) >= count)
        assert len(self.order) == count
        assert all(len(outcomes) == 1 for outcomes in self.settled.values())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for gate in bench.gates:
        gate.open()
    assert await bench.lanes.close(bench.loop.time() + 10) == []
    assert bench.lanes.outstanding == 0
    assert all(counts == {"threads": 0, "busy": 0, "queued": 0} for counts in bench.lanes.stats().values())


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_work_runs_off_the_loop_and_settles_on_it(bench: Bench, lane: Lane) -> None:
    bench.submit("a", threading.current_thread, lane)
    await bench.all_settled(1)
    ((thread, error),) = bench.settled["a"]
    assert error is None
    assert isinstance(thread, threading.Thread)
    assert thread is not threading.main_thread()
    assert thread.name.startswith(f"lmlive-{lane.value}")
    assert thread.daemon


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()])
async def test_whatever_it_raises_is_its_outcome_and_the_lane_goes_on(bench: Bench, error: BaseException) -> None:
    def fail() -> None:
        raise error

    bench.submit("bad", fail, Lane.NORMAL)
    bench.submit("good", lambda: 7, Lane.NORMAL)
    await bench.all_settled(2)
    assert bench.settled == {"bad": [(None, error)], "good": [(7, None)]}


@pytest.mark.loop_errors
async def test_a_settle_that_raises_spares_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def settle(result: object | None, error: BaseException | None) -> None:
        raise RuntimeError("settle is broken")

    bench.lanes.submit(Work(Lane.NORMAL, lambda: None, settle))
    bench.submit("good", lane=Lane.NORMAL)
    await bench.all_settled(1)
    assert "settle_failed lane=normal" in caplog.text


async def test_one_wake_up_settles_a_batch(bench: Bench) -> None:
    wakes: list[int] = []
    settle = bench.lanes._settle

    def counted() -> None:
        wakes.append(len(bench.lanes._outcomes))
        settle()

    bench.lanes._settle = counted  # type: ignore[method-assign]
    for number in range(1000):
        bench.submit(number, lane=Lane.NORMAL)
    # The loop does not look before all of them have run: one wake-up must be enough.
    while len(bench.lanes._outcomes) < 1000:
        pass
    await bench.all_settled(1000)
    assert wakes == [1000]
    assert bench.order == list(range(1000))


async def test_works_of_one_key_run_in_order_whatever_the_threads(bench: Bench) -> None:
    for number in range(300):
        bench.submit((number % 3, number), key=number % 3, cost=number)
    await bench.all_settled(300)
    for key in range(3):
        mine = [name for name in bench.ran if isinstance(name, tuple) and name[0] == key]
        assert mine == sorted(mine)


async def test_a_key_never_runs_twice_at_once_and_others_pass_it(bench: Bench) -> None:
    gate = bench.gate()
    bench.submit("first", gate.pass_through, key="a")
    bench.submit("second", key="a")
    for number in range(5):
        bench.submit(number, key=number)
    await bench.all_settled(5)
    assert "second" not in bench.ran
    assert bench.lanes.stats()["transfer"] == {"threads": 2, "busy": 1, "queued": 1}
    gate.open()
    await bench.all_settled(7)
    assert bench.ran[-1] == "second"


async def test_between_keys_the_transfer_lane_is_fair_by_cost() -> None:
    bench = Bench(transfer_threads=1)
    gate = bench.gate()
    bench.submit("start", gate.pass_through, key="start")
    for number in range(20):
        bench.submit(("greedy", number), key="greedy", cost=8 << 20)
    for number in range(20):
        bench.submit(("modest", number), key="modest", cost=1 << 20)
    gate.open()
    await bench.all_settled(41)
    place = bench.ran.index(("modest", 7))
    assert place - bench.ran.index(("greedy", 0)) <= 10
    assert await bench.lanes.close(bench.loop.time() + 10) == []


async def test_each_lane_starts_threads_as_it_needs_them_up_to_its_number(bench: Bench) -> None:
    assert bench.lanes.stats()["register"]["threads"] == 0
    bench.submit("one", lane=Lane.REGISTER)
    await bench.all_settled(1)
    assert bench.lanes.stats()["register"]["threads"] == 1
    gate = bench.gate()
    for number in range(6):
        bench.submit(number, gate.pass_through, Lane.REGISTER)
    await eventually(lambda: gate.waiting == 4)
    assert bench.lanes.stats()["register"] == {"threads": 4, "busy": 4, "queued": 2}
    gate.open()
    await bench.all_settled(7)


@pytest.mark.parametrize("stuck", [lane for lane in Lane if lane is not Lane.NORMAL])
async def test_a_lane_that_is_stuck_stops_no_other(bench: Bench, stuck: Lane) -> None:
    gate = bench.gate()
    for number in range(40):
        bench.submit(number, gate.pass_through, stuck)
    for lane in Lane:
        if lane is not stuck:
            bench.submit(lane, lane=lane)
    await bench.all_settled(len(Lane) - 1)
    assert set(bench.order) == set(Lane) - {stuck}


async def test_releases_run_sixteen_at_once_and_a_hung_one_keeps_its_place(bench: Bench) -> None:
    hung, others = bench.gate(), bench.gate()
    bench.submit("hung", hung.pass_through, Lane.RELEASE)
    for number in range(40):
        bench.submit(number, others.pass_through, Lane.RELEASE)
    await eventually(lambda: hung.waiting + others.waiting == 16)
    assert bench.lanes.stats()["release"] == {"threads": 16, "busy": 16, "queued": 25}
    others.open()
    await bench.all_settled(40)
    await eventually(lambda: bench.lanes.stats()["release"] == {"threads": 1, "busy": 1, "queued": 0})
    bench.submit("next", lane=Lane.RELEASE)
    await bench.all_settled(41)
    hung.open()
    await bench.all_settled(42)
    await eventually(lambda: bench.lanes.stats()["release"]["threads"] == 0)


async def test_close_refuses_what_waits_and_lets_what_runs_end() -> None:
    bench = Bench()
    gate = bench.gate()
    for lane in (Lane.NORMAL, Lane.TRANSFER):
        bench.submit((lane, "runs"), gate.pass_through, lane, key="k")
        bench.submit((lane, "waits"), lane=lane, key="k")
    await eventually(lambda: gate.waiting == 2)
    closing = asyncio.create_task(bench.lanes.close(bench.loop.time() + 10))
    await eventually(lambda: len(bench.order) == 2)
    gate.open()
    assert await closing == []
    await bench.all_settled(4)
    for lane in (Lane.NORMAL, Lane.TRANSFER):
        assert bench.settled[lane, "runs"] == [(None, None)]
        ((result, error),) = bench.settled[lane, "waits"]
        assert result is None
        assert isinstance(error, ServerDraining)
        assert (lane, "waits") not in bench.ran


async def test_in_a_closed_lane_a_work_settles_with_draining_and_never_within_submit() -> None:
    bench = Bench()
    assert await bench.lanes.close(bench.loop.time()) == []
    for lane in Lane:
        bench.submit(lane, lane=lane)
        assert lane not in bench.settled
    await bench.all_settled(5)
    assert all(isinstance(bench.settled[lane][0][1], ServerDraining) for lane in Lane)


async def test_what_ends_during_the_close_may_still_hand_over_a_release() -> None:
    bench = Bench()
    gate = bench.gate()

    def hand_over(result: object | None, error: BaseException | None) -> None:
        bench.submit("release", lane=Lane.RELEASE)

    bench.lanes.submit(Work(Lane.TRANSFER, gate.pass_through, hand_over))
    closing = asyncio.create_task(bench.lanes.close(bench.loop.time() + 10))
    await eventually(lambda: gate.waiting == 1)
    gate.open()
    assert await closing == []
    assert bench.ran == ["release"]
    assert bench.settled == {"release": [(None, None)]}


async def test_close_gives_what_still_runs_at_the_deadline_and_it_settles_when_it_ends() -> None:
    bench = Bench()
    gate = bench.gate()
    for lane in (Lane.TRANSFER, Lane.RELEASE):
        bench.submit(lane, gate.pass_through, lane)
    await eventually(lambda: gate.waiting == 2)
    still = await bench.lanes.close(bench.loop.time() + 0.01)
    assert {work.lane for work in still} == {Lane.TRANSFER, Lane.RELEASE}
    assert bench.order == []
    gate.open()
    await bench.all_settled(2)
    await eventually(lambda: all(counts["threads"] == 0 for counts in bench.lanes.stats().values()))


async def test_releases_that_wait_behind_hung_ones_get_a_thread_at_the_end() -> None:
    bench = Bench(release_threads=1)
    gate = bench.gate()
    bench.submit("hung", gate.pass_through, Lane.RELEASE)
    bench.submit("waits", lane=Lane.RELEASE)
    (still,) = await bench.lanes.close(bench.loop.time() + 0.01)
    assert still.lane is Lane.RELEASE
    assert bench.settled["waits"] == [(None, None)]
    gate.open()
    await bench.all_settled(2)


async def test_releases_that_wait_behind_more_hung_ones_settle_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LATE_RELEASE_SECONDS", 0.01)
    bench = Bench(release_threads=1)
    gate = bench.gate()
    for name in ("hung", "hung as well"):
        bench.submit(name, gate.pass_through, Lane.RELEASE)
    bench.submit("waits", lane=Lane.RELEASE)
    assert len(await bench.lanes.close(bench.loop.time() + 0.01)) == 2
    assert isinstance(bench.settled["waits"][0][1], ServerDraining)
    gate.open()
    await bench.all_settled(3)


async def test_the_normal_lanes_thread_is_there_before_its_first_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.lanes.open()
    assert bench.lanes.stats()["normal"] == {"threads": 1, "busy": 0, "queued": 0}
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for number in range(10):
        bench.submit(number, lane=Lane.NORMAL)
    await bench.all_settled(10)
    assert all(bench.settled[number] == [(None, None)] for number in range(10))


async def test_without_a_thread_for_the_normal_lane_there_is_no_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(StartError, match="no thread"):
            bench.lanes.open()


async def test_releases_one_after_the_other_share_a_thread(bench: Bench) -> None:
    for number in range(50):
        bench.submit(number, lane=Lane.RELEASE)
        await bench.all_settled(number + 1)
        await eventually(lambda: bench.lanes.stats()["release"]["busy"] == 0)
    assert bench.lanes.stats()["release"]["threads"] <= 2


async def test_an_idle_release_thread_ends_and_the_next_work_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_RELEASE_SECONDS", 0.0005)  # waits time out all the time, also as calls come
    bench = Bench()
    for number in range(500):
        bench.submit(number, lane=Lane.RELEASE)
        if number % 3:
            await asyncio.sleep(0.0005)
    await bench.all_settled(500)
    await eventually(lambda: bench.lanes.stats()["release"]["threads"] == 0)
    bench.submit("last", lane=Lane.RELEASE)
    await bench.all_settled(501)
    assert await bench.lanes.close(bench.loop.time() + 10) == []


async def test_without_threads_to_be_had_works_settle_with_the_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        bench.submit("a")
    await bench.all_settled(1)
    assert isinstance(bench.settled["a"][0][1], RuntimeError)
    bench.submit("b")
    await bench.all_settled(2)


def test_a_hung_work_outlives_its_loop_in_silence() -> None:
    gate = Gate()

    async def main() -> threading.Thread:
        bench = Bench()
        bench.submit("hung", gate.pass_through, Lane.RELEASE)
        await eventually(lambda: gate.waiting == 1)
        await bench.lanes.close(bench.loop.time())
        (thread,) = bench.lanes._pools[Lane.RELEASE].alive
        return thread

    thread = asyncio.run(main())
    gate.open()
    thread.join()


HANGS_IN_EVERY_LANE = """
import asyncio, threading, time
from lmlive.modules.handler import Lane, Work
from lmlive.server.lanes import Lanes

async def main():
    loop = asyncio.get_running_loop()
    lanes, hung = Lanes(loop), threading.Semaphore(0)
    for lane in Lane:
        lanes.submit(Work(lane, lambda: (hung.release(), threading.Event().wait()), print))
    for _ in Lane:
        hung.acquire()
    assert len(await lanes.close(loop.time())) == len(Lane)

asyncio.run(main())
print("over")
"""


def test_what_hangs_does_not_hold_up_the_interpreters_exit() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_IN_EVERY_LANE], check=True, capture_output=True, timeout=15)
    assert done.stdout == b"over\n"
    assert done.stderr == b""


async def test_many_works_from_all_lanes_settle_once_each(bench: Bench) -> None:
    for number in range(2000):
        bench.submit(number, lane=list(Lane)[number % 5], key=number % 7, cost=number)
        if number % 97 == 0:
            await asyncio.sleep(0)
    await bench.all_settled(2000)
    assert sorted(bench.ran, key=str) == sorted(bench.settled, key=str)
