import pytest

from lmlive.errors import InvalidPayload, MessageTooLarge, ServerBusy, StaleEpoch, UnknownInstance
from lmlive.modules.call import Call, Connection
from lmlive.modules.handler import Admit
from lmlive.modules.lookup import admit_lookup
from lmlive.modules.management import hash_secret
from lmlive.modules.unregistration import admit_unregister
from lmlive.protocol.codec import REQUEST, VERSION, Header
from lmlive.protocol.messages import Lookup, Request, Unregister
from tests.modules.kv_bench import CHUNK_BYTES, SECRET, Bench, Pending, keys_of, plain_layout

PROMPT = range(100, 124)
IDS = [4, 5, 6, 7, 8, 9]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def stored(bench: Bench, instance_id: int = 1, *, chunks: int = 3, rank: int = 0, world_size: int = 1) -> None:
    worker = bench.register(instance_id, rank=rank, world_size=world_size)
    bench.store(worker, PROMPT[: 8 * chunks], IDS[: 2 * chunks]).finish()


def test_what_is_found_is_leased(bench: Bench) -> None:
    stored(bench)
    assert bench.look_up(PROMPT) == [24, "lease-1", 60.0, "hit"]
    assert bench.books.store.leased_chunks == 3
    assert bench.look_up(range(100, 132)) == [24, "lease-2", 60.0, "partial"]
    assert bench.look_up(PROMPT[:17]) == [16, "lease-3", 60.0, "hit"]


def test_nothing_found_is_not_leased(bench: Bench) -> None:
    stored(bench)
    assert bench.look_up(range(24)) == [0, None, 60.0, "miss"]
    assert bench.look_up(PROMPT[:7]) == [0, None, 60.0, "miss"]
    assert bench.look_up([]) == [0, None, 60.0, "miss"]
    assert len(bench.books.leases) == 0


def test_an_owner_that_is_gone_leases_nothing_more(bench: Bench) -> None:
    stored(bench)
    bench.look_up(PROMPT)
    bench.books.end_owner(SECRET)
    assert bench.books.store.leased_chunks == 0
    with pytest.raises(UnknownInstance):
        bench.look_up(PROMPT)
    assert len(bench.books.leases) == 0


def test_a_scheduler_that_took_its_leave_leases_nothing_more(bench: Bench) -> None:
    stored(bench)
    scheduler = bytes(16)
    connection = Connection(1, hash_secret(scheduler), "scheduler")

    def ask(admit: Admit, message: Request) -> object:
        header = Header(VERSION, REQUEST, int(message.verb), 1, 5, 0, 0, 0)
        pending = Pending()
        call = Call(b"peer", header, bench.books.moment(), connection=connection, answer=pending.take, twice=_never)
        call.message = message
        admit(bench.books, call)
        return pending.answer

    look_up = Lookup("m", "", 1, keys_of(PROMPT), None)
    assert ask(admit_lookup, look_up) == [24, "lease-1", 60.0, "hit"]
    assert ask(admit_unregister, Unregister(scheduler)) == [True]
    with pytest.raises(UnknownInstance):
        ask(admit_lookup, look_up)
    assert len(bench.books.leases) == 0


def test_no_worker_means_that_nobody_could_load(bench: Bench) -> None:
    assert bench.look_up(PROMPT)[3] == "no_worker"
    stored(bench)
    assert bench.look_up(PROMPT, model="another") == [0, None, 60.0, "no_worker"]
    assert bench.look_up(PROMPT, world_size=2) == [0, None, 60.0, "no_worker"]
    bench.register(2, with_cache=False)
    assert bench.look_up(PROMPT)[0] == 24


def test_chunks_wait_for_a_worker(bench: Bench) -> None:
    stored(bench)
    entry = bench.books.entries.find(1)
    assert entry is not None
    bench.books.entries.detach(entry.generation)
    assert bench.look_up(PROMPT) == [0, None, 60.0, "no_worker"]
    bench.register(2)
    assert bench.look_up(PROMPT)[0] == 24


def test_the_shortest_prefix_of_all_ranks_counts(bench: Bench) -> None:
    stored(bench, 1, rank=0, world_size=2)
    stored(bench, 2, rank=1, world_size=2, chunks=2)
    assert bench.look_up(PROMPT, world_size=2) == [16, "lease-1", 60.0, "partial"]
    assert bench.books.store.leased_chunks == 4
    assert bench.look_up(PROMPT) == [0, None, 60.0, "no_worker"]


def test_one_rank_without_chunks_is_a_miss(bench: Bench) -> None:
    stored(bench, 1, rank=0, world_size=2)
    bench.register(2, rank=1, world_size=2)
    assert bench.look_up(PROMPT, world_size=2) == [0, None, 60.0, "miss"]


def test_every_live_layout_of_a_rank_counts(bench: Bench) -> None:
    stored(bench)
    newer = bench.register(2, layout=plain_layout("newer"))
    assert bench.look_up(PROMPT)[3] == "miss"
    bench.store(newer, PROMPT[:8], IDS[:2]).finish()
    tokens, lease, _, _ = bench.look_up(PROMPT)
    assert tokens == 8
    assert bench.books.store.leased_chunks == 2
    assert bench.retrieve(newer, PROMPT[:8], IDS[:2], lease=lease).finish() == [8, "loaded"]
    assert bench.books.store.leased_chunks == 0


def test_two_workers_of_a_layout_are_one_layout(bench: Bench) -> None:
    stored(bench)
    second = bench.register(2)
    bench.remove(second)
    assert bench.look_up(PROMPT)[0] == 24


def test_registering_and_reaping_never_changes_a_lease(bench: Bench) -> None:
    stored(bench)
    _, lease, _, _ = bench.look_up(PROMPT)
    entry = bench.books.entries.find(1)
    assert entry is not None
    bench.register(2, layout=plain_layout("newer"))
    bench.books.entries.detach(entry.generation)
    assert bench.books.store.leased_chunks == 3
    other = bench.register(3)
    bench.clear()
    assert bench.retrieve(other, PROMPT, IDS, lease=lease).finish() == [24, "loaded"]


def test_each_rank_has_one_share(bench: Bench) -> None:
    stored(bench, 1, rank=0, world_size=2)
    stored(bench, 2, rank=1, world_size=2)
    third = bench.register(3, rank=1, world_size=2)
    _, lease, _, _ = bench.look_up(PROMPT, world_size=2)
    bench.clear()
    assert bench.retrieve(third, PROMPT, IDS, lease=lease).finish() == [24, "loaded"]
    assert bench.retrieve(third, PROMPT, IDS, lease=lease).answer == [0, "lease_lost"]
    assert bench.books.store.leased_chunks == 3
    assert bench.release(lease) == [True]


def test_leased_chunks_are_not_evicted() -> None:
    bench = Bench(pool_chunks=3)
    stored(bench)
    _, lease, _, _ = bench.look_up(PROMPT)
    second = bench.register(2)
    assert bench.store(second, range(8), [1, 2]).answer == [0, 0, "no_space"]
    assert bench.release(lease) == [True]
    assert bench.store(second, range(8), [1, 2]).finish() == [8, 1, "stored"]


def test_looking_up_touches_the_head_last() -> None:
    bench = Bench(pool_chunks=4)
    stored(bench)
    second = bench.register(2)
    bench.store(second, range(8), [1, 2]).finish()
    bench.release(bench.look_up(PROMPT)[1])
    bench.store(second, range(8, 16), [1, 2]).finish()
    bench.store(second, range(16, 24), [1, 2]).finish()
    assert bench.look_up(range(8))[0] == 0
    assert bench.look_up(PROMPT)[0] == 16


def test_a_lease_that_is_named_is_renewed(bench: Bench) -> None:
    stored(bench, chunks=2)
    assert bench.look_up(PROMPT) == [16, "lease-1", 60.0, "partial"]
    worker = bench.register(2)
    bench.store(worker, PROMPT, IDS).finish()
    bench.books.watch.advance(bench.clock.advance(40.0), caught_up=True)
    assert bench.look_up(PROMPT, lease="lease-1") == [24, "lease-1", 60.0, "hit"]
    bench.books.watch.advance(bench.clock.advance(40.0), caught_up=True)
    assert not bench.books.leases.sweep(bench.books.moment().running)
    assert (len(bench.books.leases), bench.books.store.leased_chunks) == (1, 3)


def test_renewing_where_nothing_is_found_keeps_the_lease(bench: Bench) -> None:
    stored(bench)
    bench.look_up(PROMPT)
    bench.clear()
    assert bench.look_up(PROMPT, lease="lease-1") == [0, "lease-1", 60.0, "miss"]
    assert bench.books.store.leased_chunks == 3
    assert bench.release("lease-1") == [True]
    assert bench.look_up(PROMPT, lease="lease-1") == [0, None, 60.0, "miss"]
    assert bench.books.store.used_bytes == 0


def test_a_lease_that_ended_is_replaced(bench: Bench) -> None:
    stored(bench)
    assert bench.look_up(PROMPT, lease="unknown") == [24, "lease-1", 60.0, "hit"]


def test_release_is_true_once(bench: Bench) -> None:
    stored(bench)
    lease = bench.look_up(PROMPT)[1]
    assert bench.release(lease) == [True]
    assert bench.release(lease) == [False]
    assert bench.release("unknown") == [False]
    assert bench.books.store.leased_chunks == 0


def test_a_lease_belongs_to_the_connections_secret(bench: Bench) -> None:
    stored(bench)
    bench.look_up(PROMPT)
    assert bench.books.leases.end_owner(b"another") == 0
    assert bench.books.leases.end_owner(SECRET) == 1


def test_too_many_leases(bench: Bench) -> None:
    stored(bench)
    bench.books.leases._max_per_owner = 1
    bench.look_up(PROMPT)
    with pytest.raises(ServerBusy):
        bench.look_up(PROMPT)
    assert bench.look_up(PROMPT, lease="lease-1")[0] == 24


def test_a_prompt_over_the_limit() -> None:
    bench = Bench(max_tokens=16)
    with pytest.raises(MessageTooLarge):
        bench.look_up(PROMPT)


def test_a_connection_that_said_no_hello(bench: Bench) -> None:
    header = Header(VERSION, REQUEST, int(Lookup.verb), 1, 5, 0, 0, 0)
    pending = Pending()
    call = Call(b"peer", header, bench.books.moment(), connection=None, answer=pending.take, twice=_never)
    call.message = Lookup("m", "", 1, keys_of(PROMPT), None)
    with pytest.raises(StaleEpoch) as caught:
        admit_lookup(bench.books, call)
    assert caught.value.fields == {"hello": True}


def test_clear_answers_with_what_it_took(bench: Bench) -> None:
    stored(bench)
    bench.look_up(PROMPT[:8])
    assert bench.clear("another") == [0]
    assert bench.clear("m") == [3]
    assert bench.look_up(PROMPT)[3] == "miss"
    assert bench.books.store.used_bytes == CHUNK_BYTES
    assert bench.books.events.after(0, 10)[-1]["kind"] == "cleared"
    assert bench.release("lease-1") == [True]
    assert bench.books.store.used_bytes == 0


def test_a_key_is_there_once(bench: Bench) -> None:
    stored(bench)
    keys = keys_of(PROMPT[:8])
    with pytest.raises(InvalidPayload):
        bench._ask(admit_lookup, Lookup("m", "", 1, keys + keys, None))


def test_clear_goes_on_pass_by_pass_between_other_things() -> None:
    bench = Bench(pool_chunks=64, pass_chunks=4)
    worker = bench.register()
    bench.store(worker, range(80), range(20)).finish()
    assert bench.clear() == [10]
    assert bench.look_up(range(80))[0] == 0
    left = []
    while bench.timers:
        left.append(bench.books.store.used_bytes // CHUNK_BYTES)
        bench.timers.pop()()
    assert left == [2, 0]  # one pass with the clear, one right after it
    assert bench.books.store.used_bytes == 0


def _never(call: Call) -> None:
    raise AssertionError(call)
