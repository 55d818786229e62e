import pytest

from lmlive.modules import tiers
from lmlive.tier.base import model_mark
from tests.modules.kv_bench import Worker
from tests.modules.tier_bench import FakeTier, TierBench

PROMPT = range(100, 124)  # three chunks
IDS = [4, 5, 6, 7, 8, 9]
MISS = [0, None, 60.0, "miss"]


def stored(bench: TierBench) -> Worker:
    worker = bench.register()
    bench.store(worker, PROMPT, IDS).finish()
    return worker


def test_a_clear_takes_the_models_chunks_from_the_tier_and_answers_then() -> None:
    bench = TierBench()
    stored(bench)
    bench.run()
    cleared = bench.ask_clear("m")
    assert not cleared.answers
    bench.run()
    assert cleared.answer == [3]
    assert bench.tier.held == {}
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == MISS


def test_another_models_clear_leaves_it() -> None:
    bench = TierBench()
    stored(bench)
    bench.run()
    cleared = bench.ask_clear("n")
    asked = bench.ask_lookup(PROMPT)
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    bench.run()
    assert cleared.answer == [0]
    assert len(bench.tier.held) == 3


@pytest.mark.parametrize("model", ["m", None])
def test_what_waits_to_be_saved_is_dropped_and_what_is_being_saved_is_cleared_after_it(model: str | None) -> None:
    bench = TierBench()
    worker = stored(bench)
    saving = bench.begin()
    bench.store(worker, range(8), [1, 2]).finish()
    cleared = bench.ask_clear(model)
    [clear] = bench.works
    saving()
    assert bench.works == [clear]
    bench.run()
    assert cleared.answer == [4]
    assert bench.tier.held == {}
    assert bench.is_idle()


def test_a_clear_has_the_order_of_the_saves() -> None:
    bench = TierBench()
    stored(bench)
    bench.ask_clear()
    save, clear = bench.works
    assert save.key is clear.key is not None


@pytest.mark.parametrize("loads", [0, 1, 2])
def test_what_was_being_loaded_does_not_become_visible_after_it(loads: int) -> None:
    bench = TierBench()
    worker = stored(bench)
    bench.run()
    bench.forget()
    asked = bench.ask_lookup(PROMPT)
    find = bench.begin()
    loading = []
    if loads:
        find()
        loading = [bench.begin() for _ in range(loads)]
    cleared = bench.ask_clear("m")
    assert asked.answer == MISS  # it is told at once
    if not loads:
        find()
    for settle in loading:
        settle()
    bench.run()
    assert cleared.answer == [0]
    store = bench.books.store
    assert (store.chunks, store.reserved_chunks, store.held_back_chunks) == (0, 0, 0)
    assert bench.store(worker, PROMPT, IDS).finish() == [24, 3, "stored"]
    bench.run()
    assert bench.is_idle()


def test_until_the_tier_is_clear_nothing_is_read_of_it() -> None:
    bench = TierBench()
    stored(bench)
    bench.run()
    cleared = bench.ask_clear("m")
    assert bench.ask_lookup(PROMPT).answer == MISS
    assert len(bench.works) == 1
    bench.run()
    assert cleared.answer == [3]


def test_a_tier_that_cannot_is_asked_again_and_not_read_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    bench = TierBench(FakeTier("one"), FakeTier("two"))
    worker = stored(bench)
    bench.run()
    bench.tier.clears = False
    cleared = bench.ask_clear("m")
    bench.run()
    assert cleared.answer == [3]
    assert "tier_not_cleared tier=fake://one" in caplog.text
    assert len(bench.tier.held) == 3
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == MISS
    assert bench.tiers[0].calls.count("find") == 0
    assert bench.tiers[1].calls.count("find") == 1
    bench.pass_time(tiers.CLEAR_AGAIN_SECONDS)
    bench.run()
    bench.tier.clears = True
    bench.pass_time(tiers.CLEAR_AGAIN_SECONDS)
    bench.run()
    assert bench.tier.held == {}
    bench.store(worker, PROMPT, IDS).finish()
    bench.run()
    bench.forget()
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]


def test_two_clears_at_once_are_both_waited_for() -> None:
    bench = TierBench()
    stored(bench)
    bench.run()
    first, second = bench.ask_clear("m"), bench.ask_clear("m")
    bench.run(1)
    assert first.answer == [3]
    assert not bench.together.links[0].serves(model_mark("m"))
    bench.run()
    assert second.answer == [0]
    assert bench.together.links[0].serves(model_mark("m"))


def test_a_tier_that_does_not_answer_holds_up_nobody_for_long() -> None:
    bench = TierBench()
    stored(bench)
    bench.run()
    slow, hasty = bench.ask_clear("m"), bench.ask_clear("m", within=0.5)
    bench.pass_time(0.49)
    assert hasty.answer == [0]
    bench.pass_time(0.52)
    assert slow.answer == [3]
    assert bench.ask_lookup(PROMPT).answer == MISS
    bench.run()
    assert bench.tier.held == {}


def test_after_the_stop_it_is_not_asked_again() -> None:
    bench = TierBench()
    stored(bench)
    bench.run()
    bench.tier.clears = False
    bench.ask_clear()
    bench.run()
    bench.together.stop()
    bench.pass_time(tiers.CLEAR_AGAIN_SECONDS)
    assert bench.works == []
