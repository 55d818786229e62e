from typing import Any

import pytest

from lmlive.modules import prefetch
from tests.modules.kv_bench import RUN, Worker, keys_of, plain_layout
from tests.modules.tier_bench import FakeTier, TierBench

PROMPT = range(100, 124)  # three chunks
IDS = [4, 5, 6, 7, 8, 9]
MISS = [0, None, 60.0, "miss"]


def saved(bench: TierBench, tokens: range = PROMPT, instance_id: int = 1, **known: Any) -> Worker:
    """Store a prompt, let it be saved, and forget it in the pool."""
    worker = bench.register(instance_id, **known)
    assert bench.store(worker, tokens, list(range(len(tokens) // 4))).finish()[0] == len(tokens)  # type: ignore[index]
    bench.run_all()
    bench.forget()
    return worker


def resting(bench: TierBench) -> bool:
    bench.books.leases.end_owner(b"secret")
    bench.books.sweep()
    bench.run_all()
    return bench.is_idle()


def test_what_a_tier_has_is_loaded_and_promised() -> None:
    bench = TierBench()
    worker = saved(bench)
    asked = bench.ask_lookup(PROMPT)
    assert not asked.answers
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    worker.memory[:] = 0
    assert bench.retrieve(worker, PROMPT, IDS, lease="lease-1").finish() == [24, "loaded"]
    loaded = worker.blocks(*IDS)
    worker.fill()
    assert loaded == worker.blocks(*range(6))
    assert resting(bench)


def test_it_is_not_saved_again() -> None:
    bench = TierBench()
    saved(bench)
    bench.ask_lookup(PROMPT)
    bench.run()
    assert bench.tier.calls == ["save"] * 3 + ["find"] + ["load"] * 3


def test_what_no_tier_has_is_a_miss_and_evicts_nothing() -> None:
    bench = TierBench(pool_chunks=1)
    worker = bench.register()
    assert bench.store(worker, range(8), [1, 2]).finish() == [8, 1, "stored"]
    bench.run()
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == MISS
    assert bench.look_up(range(8))[0] == 8
    assert resting(bench)


def test_what_the_pool_has_is_answered_at_once() -> None:
    bench = TierBench()
    worker = saved(bench)
    bench.store(worker, PROMPT, IDS).finish()
    calls = len(bench.tier.calls)
    assert bench.ask_lookup(PROMPT).answer == [24, "lease-1", 60.0, "hit"]
    assert bench.tier.calls[calls:] == []


def test_without_a_worker_nothing_is_asked() -> None:
    bench = TierBench()
    assert bench.ask_lookup(PROMPT).answer == [0, None, 60.0, "no_worker"]
    bench.register()
    assert bench.ask_lookup(PROMPT[:7]).answer == MISS
    assert bench.works == []


def test_only_what_follows_the_head_in_the_pool_is_loaded() -> None:
    bench = TierBench()
    worker = saved(bench)
    bench.store(worker, PROMPT[:16], IDS[:4]).finish()
    bench.run()
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    assert bench.tier.calls.count("load") == 1


def test_a_hole_in_the_tier_that_the_pool_fills_is_no_hole_the_next_time() -> None:
    bench = TierBench()
    worker = saved(bench)
    del bench.tier.held[bench.names(PROMPT, worker)[1]]
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [8, "lease-1", 60.0, "partial"]
    bench.store(worker, PROMPT[:16], IDS[:4]).finish()
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [24, "lease-2", 60.0, "hit"]


def test_who_waited_long_enough_is_answered_from_memory_and_the_next_one_hits() -> None:
    bench = TierBench()
    saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.run(2)  # the find, and one chunk
    bench.pass_time(0.0999)
    assert not asked.answers
    bench.pass_time(0.0002)
    assert asked.answer == [8, "lease-1", 60.0, "partial"]
    bench.run()
    assert bench.look_up(PROMPT)[0] == 24
    assert resting(bench)


def test_a_callers_deadline_comes_before_the_patience() -> None:
    bench = TierBench()
    saved(bench)
    asked = bench.ask_lookup(PROMPT, within=0.05)
    bench.pass_time(0.0299)
    assert not asked.answers
    bench.pass_time(0.0002)
    assert asked.answer == MISS


@pytest.mark.parametrize("within", [0.0, 0.015])
def test_without_patience_it_is_loaded_all_the_same(within: float) -> None:
    bench = TierBench(tier_wait_seconds=0.1 if within else 0.0)
    saved(bench)
    assert bench.ask_lookup(PROMPT, within=within).answer == MISS
    bench.run()
    assert bench.look_up(PROMPT)[0] == 24


def test_two_that_ask_for_the_same_join() -> None:
    bench = TierBench()
    saved(bench)
    first, second = bench.ask_lookup(PROMPT), bench.ask_lookup(PROMPT)
    bench.run()
    assert first.answer == [24, "lease-1", 60.0, "hit"]
    assert second.answer == [24, "lease-2", 60.0, "hit"]
    assert bench.tier.calls[3:] == ["find", "load", "load", "load"]
    assert resting(bench)


def test_two_prompts_with_a_common_head_load_it_once() -> None:
    bench = TierBench()
    saved(bench)
    other = [*PROMPT[:16], *range(8)]
    worker = bench.books.entries.find(1)
    assert worker is not None
    bench.store(Worker(worker, bench.backend.mappings[-1].memory), other, IDS).finish()
    bench.run_all()
    bench.forget()
    first, second = bench.ask_lookup(PROMPT), bench.ask_lookup(other)
    bench.run()
    assert first.answer == [24, "lease-1", 60.0, "hit"]
    assert second.answer == [24, "lease-2", 60.0, "hit"]
    assert bench.tier.calls.count("load") == 4
    assert resting(bench)


def test_a_tier_is_read_by_so_many_at_a_time() -> None:
    bench = TierBench(pool_chunks=20)
    saved(bench, range(80))
    bench.ask_lookup(range(80))
    bench.run(1)
    assert len(bench.works) == bench.books.store.reserved_chunks == prefetch.READS_AT_ONCE
    bench.begin(1)()  # in whatever order they end
    assert len(bench.works) == prefetch.READS_AT_ONCE
    bench.run()
    assert bench.look_up(range(80))[0] == 80
    assert resting(bench)


def test_one_that_is_not_there_after_all_ends_it() -> None:
    bench = TierBench()
    worker = saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.run(1)
    del bench.tier.held[bench.names(PROMPT, worker)[1]]
    bench.run()
    assert asked.answer == [8, "lease-1", 60.0, "partial"]
    assert resting(bench)


def test_another_tier_gives_what_the_first_does_not() -> None:
    bench = TierBench(FakeTier("one"), FakeTier("two"))
    worker = saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.run(2)
    del bench.tiers[0].held[bench.names(PROMPT, worker)[1]]
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    assert bench.tiers[1].calls.count("load") == 1


def test_the_tier_that_has_more_is_asked_first() -> None:
    bench = TierBench(FakeTier("one"), FakeTier("two"))
    worker = saved(bench)
    del bench.tiers[0].held[bench.names(PROMPT, worker)[1]]
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    assert bench.tiers[0].calls.count("load") == 0


def test_a_tier_all_of_whose_threads_hang_holds_up_no_other() -> None:
    bench = TierBench(FakeTier("hung"), FakeTier("good"))
    saved(bench)
    bench.together.links[0].reading = prefetch.READS_AT_ONCE
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]


def test_a_tier_that_fails_is_a_miss() -> None:
    bench = TierBench()
    saved(bench)
    bench.tier.failing = "gone"
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == MISS
    assert [event["kind"] for event in bench.books.events.after(0, 99)][-1] == "tier_failed"
    assert resting(bench)


def test_a_tier_that_raises_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    bench = TierBench()
    saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.run(1)

    def broken() -> None:
        raise ValueError

    bench.tier.on_load = broken
    bench.run()
    assert asked.answer == MISS
    assert "tier broken" in caplog.text
    assert resting(bench)


def test_at_its_deadline_a_prefetch_gives_up_what_it_reserved() -> None:
    bench = TierBench()
    saved(bench)
    bench.ask_lookup(PROMPT)
    bench.run(1)
    hung = [bench.begin(), bench.begin(), bench.begin()]
    bench.pass_time(prefetch.PREFETCH_SECONDS)
    store = bench.books.store
    assert (store.reserved_chunks, store.held_back_chunks) == (0, 3)
    for settle in hung:
        settle()
    assert (store.held_back_chunks, store.chunks, store.used_bytes) == (0, 0, 0)
    assert resting(bench)


def test_a_store_takes_a_chunk_over_that_is_being_loaded() -> None:
    """It is neither put off nor passed over, whatever the tier does."""
    bench = TierBench()
    worker = saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.run(1)
    loading = [bench.begin(), bench.begin(), bench.begin()]
    assert bench.store(worker, PROMPT, IDS).finish() == [24, 3, "stored"]
    for settle in loading:
        settle()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    assert resting(bench)


def test_a_chunk_that_a_store_is_writing_is_not_loaded() -> None:
    bench = TierBench()
    worker = saved(bench)
    pending = bench.store(worker, PROMPT[:8], IDS[:2])
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == MISS
    assert bench.tier.calls.count("load") == 2
    pending.finish()
    assert bench.look_up(PROMPT)[0] == 24


def test_a_prefetch_takes_half_of_the_pool_at_most() -> None:
    bench = TierBench(pool_chunks=4)
    saved(bench, range(32))
    asked = bench.ask_lookup(range(32))
    bench.run()
    assert asked.answer == [16, "lease-1", 60.0, "partial"]


def test_where_there_is_no_room_it_ends() -> None:
    bench = TierBench(pool_chunks=6)
    worker = saved(bench)
    bench.store(worker, range(32), range(8)).finish()
    bench.run_all()
    bench.look_up(range(32))  # four of six are leased
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [16, "lease-2", 60.0, "partial"]
    assert resting(bench)


def test_too_many_prompts_are_answered_from_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetch, "MOST_PREFETCHES", 1)
    bench = TierBench()
    saved(bench)
    asked = bench.ask_lookup(PROMPT)
    assert bench.ask_lookup(range(8)).answer == MISS
    caplog.set_level("INFO")
    for _ in range(2):
        bench.together.tell_counts()
    assert caplog.text.count("tier_busy lookups=1") == 1
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]


def test_every_rank_gets_its_own_or_none_gets_more() -> None:
    bench = TierBench()
    saved(bench, instance_id=1, rank=0, world_size=2)
    second = bench.register(2, rank=1, world_size=2)
    bench.store(second, PROMPT[:16], IDS[:4]).finish()
    bench.run_all()
    bench.forget()
    asked = bench.ask_lookup(PROMPT, world_size=2)
    bench.run()
    assert asked.answer == [16, "lease-1", 60.0, "partial"]
    assert bench.tier.calls.count("load") == 4


def test_a_rank_that_has_it_in_the_pool_needs_no_tier_for_it() -> None:
    bench = TierBench()
    first = saved(bench, instance_id=1, rank=0, world_size=2)
    second = saved(bench, instance_id=2, rank=1, world_size=2)
    bench.store(first, PROMPT, IDS).finish()
    bench.run_all()
    for name in bench.names(PROMPT, first):
        del bench.tier.held[name]
    asked = bench.ask_lookup(PROMPT, world_size=2)
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    assert second.entry.live


def test_layouts_of_other_sizes_are_loaded_by_their_own() -> None:
    bench = TierBench()
    saved(bench)
    wide = bench.register(2, layout=plain_layout("wide"))
    bench.store(wide, PROMPT, IDS).finish()
    bench.run_all()
    bench.forget()
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]
    assert bench.books.store.chunks == 6


def test_with_checksums_what_was_loaded_is_checked_like_what_was_stored() -> None:
    bench = TierBench(checksum=True)
    worker = saved(bench)
    bench.ask_lookup(PROMPT)
    bench.run()
    assert bench.retrieve(worker, PROMPT, IDS).finish() == [24, "loaded"]
    assert bench.books.pool is not None
    bench.books.pool[: 3 * 4 * RUN] ^= 1
    assert bench.retrieve(worker, PROMPT, IDS).finish() == [0, "miss"]


def test_who_is_gone_when_the_answer_comes_gets_none_and_leases_nothing() -> None:
    bench = TierBench()
    saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.books.leases.end_owner(b"secret", for_good=True)
    bench.run()
    assert isinstance(asked.answer, Exception)
    assert bench.books.store.leased_chunks == 0


def test_a_lease_that_is_named_is_renewed_with_what_was_loaded() -> None:
    bench = TierBench()
    worker = saved(bench)
    bench.store(worker, PROMPT[:8], IDS[:2]).finish()
    bench.run()
    assert bench.look_up(PROMPT[:8])[1] == "lease-1"
    asked = bench.ask_lookup(PROMPT, lease="lease-1")
    bench.run()
    assert asked.answer == [24, "lease-1", 60.0, "hit"]


def test_the_stop_ends_all_and_begins_nothing() -> None:
    bench = TierBench()
    saved(bench)
    asked = bench.ask_lookup(PROMPT)
    bench.run(1)
    loading = bench.begin()
    bench.together.stop()
    assert asked.answer == MISS
    assert not bench.together.idle
    loading()
    bench.run()
    assert bench.together.idle
    assert bench.ask_lookup(PROMPT).answer == MISS
    assert resting(bench)


def test_the_head_is_the_last_to_go_afterwards() -> None:
    bench = TierBench(pool_chunks=6)
    worker = saved(bench)
    bench.release(str(_answered(bench)[1]))
    bench.store(worker, range(32), range(8)).finish()
    keys = keys_of(PROMPT)
    assert worker.entry.namespace is not None
    held = bench.books.store.held(worker.entry.namespace, [keys[at : at + 32] for at in (0, 32, 64)])
    assert held.size == 2


def _answered(bench: TierBench) -> list[object]:
    asked = bench.ask_lookup(PROMPT)
    bench.run()
    assert isinstance(asked.answer, list)
    return asked.answer
