import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from lmlive.clock import MonotonicClock
from lmlive.config.tiers import ValkeyPlace
from lmlive.errors import StartError
from lmlive.tier.base import MARK_BYTES, model_mark
from lmlive.tier.valkey import PIECE_BYTES, ValkeyTier
from tests.tier.chunks import SIZE, chunk, empty, name
from tests.tier.redis_servers import RedisServer, free_port, need_redis, redis_cluster, redis_server

pytestmark = [need_redis, pytest.mark.timeout(60)]

CLOCK = MonotonicClock()


def soon() -> float:
    return CLOCK.now() + 20.0


@contextmanager
def opened(port: int, **settings: Any) -> Iterator[ValkeyTier]:
    tier = ValkeyTier(ValkeyPlace("127.0.0.1", port, **{"timeout": 5.0, **settings}), CLOCK)
    tier.open()
    with closing(tier):
        yield tier


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as one:
        yield one


def keys(server: RedisServer) -> list[str]:
    """Give what is there but for the words that all bear."""
    with closing(server.client()) as client:
        return sorted(key.decode() for key in client.keys("*{*"))


def test_what_was_saved_is_found_and_loaded_whole_by_another_host_too(server: RedisServer) -> None:
    with opened(server.port) as tier, opened(server.port) as other:
        assert tier.find([name(1)], soon()) == 0
        assert tier.save(name(1), chunk(1), soon())
        assert other.find([name(1), name(2)], soon()) == 1
        into = empty()
        assert other.load(name(1), into, soon())
        assert (into == chunk(1)).all()
        assert not other.load(name(2), into, soon())
        assert other.save(name(1), chunk(1), soon())  # it is there: nothing is written
        assert (tier.counts.saved, other.counts.saved) == (1, 0)
        assert (other.counts.loaded, other.counts.missed, other.counts.failures) == (1, 1, 0)
        assert len(keys(server)) == 1 + -(-SIZE // PIECE_BYTES)
        assert not tier.find([], soon())


def test_every_key_has_a_prefix_and_a_time_to_live_and_the_pieces_live_longer(server: RedisServer) -> None:
    with opened(server.port, ttl=100, prefix="team") as tier, closing(server.client()) as client:
        assert tier.save(name(1), chunk(1), soon())
        left = {key: client.ttl(key) for key in keys(server)}
        assert all(key.startswith("team:{") for key in left)
        head = min(left, key=len)
        assert 0 < left.pop(head) <= 100
        assert all(100 < seconds <= 160 for seconds in left.values())


@pytest.mark.parametrize(
    "harm", ["piece_gone", "piece_short", "piece_flipped", "head_flipped", "head_short", "other_type"]
)
def test_what_is_not_whole_is_a_miss_and_goes(server: RedisServer, harm: str) -> None:
    with opened(server.port) as tier, closing(server.client()) as client:
        assert tier.save(name(1), chunk(1), soon())
        head, *pieces = sorted(keys(server), key=lambda key: (len(key), key))
        if harm == "piece_gone":
            client.delete(pieces[1])
        elif harm == "piece_short":
            client.set(pieces[1], client.get(pieces[1])[:-1])
        elif harm == "piece_flipped":
            client.setrange(pieces[-1], 5, bytes([client.getrange(pieces[-1], 5, 5)[0] ^ 1]))
        elif harm == "head_flipped":
            client.setrange(head, 9, bytes([client.getrange(head, 9, 9)[0] ^ 1]))
        elif harm == "head_short":
            client.set(head, client.get(head)[:-1])
        else:
            client.delete(head)
            client.lpush(head, "x")
        assert not tier.load(name(1), empty(), soon())
        if harm == "other_type":
            assert tier.counts.failures == 1  # what others keep under our keys is theirs
        else:
            assert (tier.counts.corrupt, tier.find([name(1)], soon())) == (1, 0)
            assert tier.save(name(1), chunk(1), soon())
            assert tier.load(name(1), empty(), soon())


def test_above_its_cap_nothing_more_is_saved(server: RedisServer) -> None:
    with opened(server.port, most_bytes=12 << 20) as tier:
        saved = [tier.save(name(seed), chunk(seed), soon()) for seed in range(6)]
        assert saved[0]
        assert not saved[-1]
        assert tier.counts.refused >= 3
        assert tier.used_bytes is not None
        assert tier.load(name(0), empty(), soon())


def test_a_server_that_is_full_refuses_and_is_left_alone(server: RedisServer) -> None:
    with opened(server.port) as tier, closing(server.client()) as client:
        client.config_set("maxmemory", "2mb")
        assert not tier.save(name(1), chunk(1), soon())
        assert tier.counts.failures == 1
        assert not tier.load(name(1), empty(), soon())


def test_nobody_there_is_a_miss_and_it_is_used_once_it_comes() -> None:
    port = free_port()
    with opened(port) as tier:
        assert tier.find([name(1)], soon()) == 0
        assert not tier.save(name(1), chunk(1), soon())
        assert tier.counts.failures == 1  # at the start; after that nobody was asked
        assert tier.failing is not None
        assert str(port) in tier.failing
        with redis_server(port=port):
            tier._closed_until = 0.0  # as after the pause
            assert tier.save(name(1), chunk(1), soon())
            assert tier.failing is None


def test_one_that_is_killed_in_the_middle_of_traffic_is_a_miss_and_comes_back(server: RedisServer) -> None:
    with opened(server.port, timeout=1.0) as tier:
        assert tier.save(name(0), chunk(0), soon())
        ends = threading.Event()
        outcomes: list[bool] = []

        def traffic() -> None:
            while not ends.is_set():
                into = empty()
                loaded = tier.load(name(0), into, soon())
                outcomes.append(loaded)
                assert not loaded or (into == chunk(0)).all()
                tier.save(name(len(outcomes)), chunk(1), soon())

        threads = [threading.Thread(target=traffic) for _ in range(3)]
        for thread in threads:
            thread.start()
        while not any(outcomes):
            pass
        server.kill()
        before = tier.counts.missed
        while tier.counts.missed < before + 3:
            pass
        server.start()
        tier._closed_until = 0.0  # as after the pause
        while not tier.save(name(0), chunk(0), soon()):
            tier._closed_until = 0.0
        seen = len(outcomes)
        while not any(outcomes[seen:]):
            pass
        ends.set()
        for thread in threads:
            thread.join()


def test_one_that_does_not_answer_costs_its_timeout_once(server: RedisServer) -> None:
    """A late answer of then is nobody's answer afterwards."""
    with opened(server.port, timeout=0.2) as tier:
        assert tier.save(name(1), chunk(1), soon())
        assert tier.save(name(2), chunk(2), soon())
        server.stop()
        assert not tier.load(name(1), empty(), soon())
        assert tier.counts.failures == 1
        for seed in range(100):
            assert not tier.load(name(seed), empty(), soon())
            assert not tier.save(name(seed), chunk(seed, 64), soon())
        assert tier.counts.failures == 1
        server.go_on()
        tier._closed_until = 0.0
        into = empty()
        assert tier.load(name(2), into, soon())
        assert (into == chunk(2)).all()


def test_a_deadline_is_kept_though_the_server_does_not_answer(server: RedisServer) -> None:
    with opened(server.port, timeout=50.0) as tier:
        assert tier.save(name(1), chunk(1), soon())
        server.stop()
        assert tier.find([name(1)], CLOCK.now() + 0.1) == 0
        server.go_on()
        tier._closed_until = 0.0
        assert not tier.load(name(1), empty(), CLOCK.now() - 1.0)
        assert tier.load(name(1), empty(), soon())


def test_a_password_is_needed_and_never_shown() -> None:
    with redis_server("--requirepass", "sesame") as server:
        with opened(server.port, password="sesame") as tier:  # noqa: S106
            assert "sesame" not in tier.url + repr(tier._place)
        for wrong in (None, "tahini"):
            with pytest.raises(StartError, match="refuses us") as caught, opened(server.port, password=wrong):
                pass
            assert "tahini" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"database": 9999}, {"cluster": True}])
def test_one_that_will_never_do_is_an_error_of_the_start(server: RedisServer, settings: dict[str, Any]) -> None:
    with pytest.raises(StartError, match="refuses us"), opened(server.port, **settings):
        pass


def test_a_cluster_that_is_not_there_may_come() -> None:
    with opened(free_port(), cluster=True) as tier:
        assert tier.counts.failures == 1
        assert not tier.save(name(1), chunk(1), soon())


def test_a_clear_hides_one_models_chunks_or_all_and_new_ones_are_found(server: RedisServer) -> None:
    mine, yours = (model_mark(model) + name(1)[MARK_BYTES:] for model in "mn")
    with opened(server.port) as tier, opened(server.port) as other:
        for one in (mine, yours):
            assert tier.save(one, chunk(1), soon())
        assert tier.clear(model_mark("m"), soon())
        assert (tier.find([mine], soon()), tier.find([yours], soon())) == (0, 1)
        assert not tier.load(mine, empty(), soon())
        assert tier.save(mine, chunk(2), soon())
        into = empty()
        assert other.load(mine, into, soon())  # which never knew the old words
        assert (into == chunk(2)).all()
        assert other.clear(None, soon())
        tier._words.clear()  # as after a second
        assert (tier.find([mine], soon()), other.find([yours], soon())) == (0, 0)


def test_words_that_were_read_before_a_clear_are_not_remembered_after_it(server: RedisServer) -> None:
    """A lookup that asked for them is overtaken by a clear before it hears the answer."""
    with opened(server.port) as tier:
        assert tier.save(name(1), chunk(1), soon())
        tier._words.clear()
        read = tier._client.hmget

        async def overtaken(*asked: str) -> object:
            found = await read(*asked)
            await tier._clear(None)
            return found

        tier._client.hmget = overtaken
        assert tier.find([name(1)], soon()) == 1  # it was asked before
        tier._client.hmget = read
        assert tier.find([name(1)], soon()) == 0


def test_words_that_the_server_lost_are_a_clear(server: RedisServer) -> None:
    with opened(server.port) as tier, closing(server.client()) as client:
        assert tier.save(name(1), chunk(1), soon())
        client.delete("lmlive:words")
        tier._words.clear()
        assert tier.find([name(1)], soon()) == 0
        assert tier.save(name(1), chunk(1), soon())
        assert tier.find([name(1)], soon()) == 1


def test_a_clear_that_nobody_answers_is_none(server: RedisServer) -> None:
    with opened(server.port, timeout=0.2) as tier:
        server.kill()
        assert not tier.clear(None, soon())


def test_many_are_found_in_few_round_trips(server: RedisServer) -> None:
    names = [name(0)[:MARK_BYTES] + name(seed)[MARK_BYTES:] for seed in range(200)]
    with opened(server.port) as tier:
        for one in names[:130]:
            assert tier.save(one, chunk(1, 64), soon())
        assert tier.find(names, soon()) == 130
        assert tier.find(names[:130], soon()) == 130


def test_a_closed_one_misses() -> None:
    tier = ValkeyTier(ValkeyPlace("127.0.0.1", free_port()), CLOCK)
    tier.open()
    tier.close()
    tier.close()
    assert not tier.save(name(1), chunk(1), soon())
    assert not tier.load(name(1), empty(), soon())


def test_a_cluster_of_three_spreads_chunks_and_the_end_of_a_node_is_a_miss() -> None:
    with redis_cluster() as nodes, opened(nodes[0].port, cluster=True, timeout=1.0) as tier:
        for seed in range(12):
            assert tier.save(name(seed), chunk(seed), soon())
        assert all(keys(node) for node in nodes)
        for seed in range(12):
            into = empty()
            assert tier.load(name(seed), into, soon())
            assert (into == chunk(seed)).all()
        lost = {key for key in keys(nodes[2]) if key.count(":") == 1}
        nodes[2].kill()
        for seed in range(12):
            tier._closed_until = 0.0
            into = empty()
            loaded = tier.load(name(seed), into, soon())
            assert not loaded or (into == chunk(seed)).all()
            assert not (loaded and any(name(seed).hex() in key for key in lost))
        assert tier.counts.failures >= 1


def test_the_cap_of_a_cluster_is_over_all_its_nodes() -> None:
    with redis_cluster() as nodes, opened(nodes[0].port, cluster=True, most_bytes=20 << 20) as tier:
        saved = [tier.save(name(seed), chunk(seed), soon()) for seed in range(8)]
        assert saved[0]
        assert not saved[-1]
