import pytest

from lmlive.modules import behind
from tests.modules.kv_bench import CHUNK_BYTES, Worker
from tests.modules.tier_bench import FakeTier, TierBench

PROMPT = range(100, 124)  # three chunks
IDS = [4, 5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def _a_long_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "WAITING_SHARE", 100.0)


def stored(bench: TierBench, tokens: range = PROMPT) -> Worker:
    worker = bench.register()
    ids = list(range(len(tokens) // 4))
    assert bench.store(worker, tokens, ids).finish() == [len(tokens), len(tokens) // 8, "stored"]
    return worker


def test_what_was_stored_is_saved_after_the_reply() -> None:
    bench = TierBench()
    worker = stored(bench)
    assert bench.tier.held == {}
    assert bench.run() == 1
    assert list(bench.tier.held) == bench.names(PROMPT, worker)
    [offset, *_] = bench.books.store.offsets(bench.books.store.held(worker.entry.namespace, keys(bench))).tolist()  # type: ignore[arg-type]
    assert bench.books.pool is not None
    assert next(iter(bench.tier.held.values())) == bench.books.pool[offset : offset + CHUNK_BYTES].tobytes()
    assert bench.is_idle()


def keys(bench: TierBench) -> list[bytes]:
    [space] = bench.books.store._spaces.values()
    return list(space.index)


def test_every_tier_gets_it() -> None:
    bench = TierBench(FakeTier("one"), FakeTier("two"))
    stored(bench)
    assert bench.run() == 2
    assert len(bench.tiers[0].held) == len(bench.tiers[1].held) == 3


def test_what_is_present_already_is_not_saved_again() -> None:
    bench = TierBench()
    worker = stored(bench)
    bench.run()
    assert bench.store(worker, PROMPT, IDS).finish() == [24, 0, "present"]
    assert bench.run() == 0


def test_what_is_read_is_not_evicted_and_what_waits_is() -> None:
    bench = TierBench(pool_chunks=3)
    worker = stored(bench)
    settle = bench.begin()  # the lane is reading the chunks
    assert bench.store(worker, range(8), [1, 2]).finish() == [0, 0, "no_space"]
    settle()
    assert bench.store(worker, range(8), [1, 2]).finish() == [8, 1, "stored"]
    assert bench.store(worker, range(8, 16), [1, 2]).finish() == [8, 1, "stored"]
    assert bench.run() == 2
    assert len(bench.tier.held) == 5


def test_one_that_was_evicted_before_its_turn_is_not_saved() -> None:
    bench = TierBench(pool_chunks=3)
    worker = stored(bench, PROMPT[:8])
    first = bench.begin()
    for start in (0, 8, 16):  # of these the first is pushed out by the last
        assert bench.store(worker, range(start, start + 8), [1, 2]).finish() == [8, 1, "stored"]
    first()
    assert bench.run() == 1
    assert len(bench.tier.held) == 3
    assert bench.together.links[0].lost == 1
    assert bench.is_idle()


def test_saving_is_no_use_a_prefix_still_loses_its_tail_first() -> None:
    bench = TierBench(pool_chunks=3)
    worker = stored(bench)
    bench.run()
    assert bench.store(worker, range(8), [1, 2]).finish() == [8, 1, "stored"]
    assert bench.look_up(PROMPT[:16])[0] == 16


def test_the_line_is_bounded_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "MOST_WAITING", 2)
    monkeypatch.setattr(behind, "BATCH_CHUNKS", 1)
    bench = TierBench()
    worker = stored(bench)  # the first one is begun with, two had room beside it
    assert bench.store(worker, range(16), [1, 2, 3, 4]).finish() == [16, 2, "stored"]
    bench.run()
    assert (len(bench.tier.held), bench.together.links[0].dropped) == (3, 2)
    assert bench.is_idle()


def test_the_line_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "BATCH_BYTES", 1)
    monkeypatch.setattr(behind, "WAITING_SHARE", 0.5)
    bench = TierBench(pool_chunks=4)  # half of it may wait
    stored(bench)
    bench.run()
    assert (len(bench.tier.held), bench.together.links[0].dropped) == (2, 1)


def test_one_chunk_always_has_room_in_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "WAITING_SHARE", 0.5)
    bench = TierBench(pool_chunks=1)
    stored(bench, PROMPT[:8])
    bench.run()
    assert len(bench.tier.held) == 1


def test_batches_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "BATCH_CHUNKS", 2)
    bench = TierBench()
    stored(bench)
    assert len(bench.works) == 1
    assert bench.run() == 2
    assert len(bench.tier.held) == 3


def test_a_long_line_of_what_is_gone_is_gone_through_pass_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind, "_LOOKS", 1)
    bench = TierBench()
    stored(bench)
    begun = bench.begin()
    worker = bench.register(2)
    bench.store(worker, range(24), IDS).finish()
    bench.books.store.clear()
    begun()
    bench.run_all()
    assert bench.together.quiet
    assert bench.together.links[0].lost == 5  # all but the one that was begun with


def test_a_failing_tier_is_told_of_once_and_so_is_its_return() -> None:
    bench = TierBench()
    bench.tier.failing = "nobody there"
    worker = stored(bench)
    bench.run()
    assert bench.store(worker, range(8), [1, 2]).finish() == [8, 1, "stored"]
    bench.run()
    events = [event for event in bench.books.events.after(0, 100) if str(event["kind"]).startswith("tier")]
    assert [(event["kind"], event["tier"], event.get("reason")) for event in events] == [
        ("tier_failed", "fake://one", "nobody there")
    ]
    bench.tier.failing = None
    for start in (8, 16):
        assert bench.store(worker, range(start, start + 8), [1, 2]).finish() == [8, 1, "stored"]
        bench.run()
    assert [event["kind"] for event in bench.books.events.after(int(events[-1]["seq"]), 9)] == ["tier_back"]  # type: ignore[call-overload]
    assert bench.is_idle()


def test_a_tier_that_raises_takes_nothing_along(caplog: pytest.LogCaptureFixture) -> None:
    bench = TierBench()
    stored(bench)
    bench.tier.held = None  # type: ignore[assignment]
    bench.run()
    assert "tier broken url=fake://one" in caplog.text
    assert bench.is_idle()


def test_after_the_stop_nothing_is_saved() -> None:
    bench = TierBench()
    worker = bench.register()
    bench.together.stop()
    bench.store(worker, PROMPT, IDS).finish()
    assert bench.run() == 0
    assert bench.is_idle()


def test_with_checksums_a_chunk_that_is_not_what_it_was_is_not_saved() -> None:
    bench = TierBench(checksum=True)
    stored(bench)
    assert bench.books.pool is not None
    bench.books.pool[5] ^= 1
    bench.run()
    assert len(bench.tier.held) == 2


def test_the_counts_are_told_when_they_changed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bench = TierBench()
    stored(bench)
    bench.run()
    bench.together.tick()
    assert "tier url" not in caplog.text
    bench.pass_time(60.0)
    bench.together.tick()
    assert "tier url=fake://one used_bytes=192 saved=3 loaded=0 missed=0" in caplog.text
    caplog.clear()
    bench.pass_time(60.0)
    bench.together.tick()
    assert "tier url" not in caplog.text
