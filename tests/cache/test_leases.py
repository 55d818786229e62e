from itertools import count

import pytest

from lmlive.cache.arena import Arena
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.cache.leases import LeaseTable, Share
from lmlive.cache.store import ChunkStore
from lmlive.errors import ServerBusy, UnknownInstance

KEYS = [b"a", b"b", b"c"]
OWNER = b"owner"


def space(rank: int, layout: bytes = b"layout") -> Namespace:
    return Namespace("m", "", layout, rank, 2)


class House:
    """A store with three chunks for each of two ranks, and a table with numbers for tokens."""

    def __init__(self, *, max_per_owner: int = 10, pass_pins: int = 1000, remembered: int = 10) -> None:
        self.store = ChunkStore(Arena(6400))
        self.chunks = {rank: self.put(space(rank)) for rank in (0, 1)}
        numbers = count(1)
        self.leases = LeaseTable(
            self.store,
            seconds=60.0,
            token=lambda: str(next(numbers)),
            max_per_owner=max_per_owner,
            pass_pins=pass_pins,
            remembered=remembered,
        )

    def put(self, namespace: Namespace) -> Chunks:
        reservation = self.store.claim(namespace, KEYS, 64, 1).reservation
        assert reservation is not None
        return self.store.commit(reservation)

    def share(self, rank: int, length: int = 3) -> Share:
        return {space(rank): self.chunks[rank][:length]}

    def open(self, now: float = 0.0, *, owner: bytes = OWNER, length: int = 3) -> str:
        return self.leases.open(owner, {rank: self.share(rank, length) for rank in (0, 1)}, now)

    def use(self, lease: str, rank: int, now: float = 0.0, keys: list[bytes] = KEYS) -> list[bytes] | None:
        """Load and give back."""
        chunks = self.leases.use(lease, space(rank), keys, now)
        if chunks is None:
            return None
        self.store.give_back(chunks)
        return keys[: chunks.size]


@pytest.fixture
def house() -> House:
    return House()


def test_a_lease_pins_every_ranks_chunks(house: House) -> None:
    house.open()
    assert house.store.leased_chunks == 6
    assert len(house.leases) == 1


def test_each_rank_uses_its_share_once(house: House) -> None:
    lease = house.open()
    assert house.use(lease, 0) == KEYS
    assert house.store.leased_chunks == 3
    assert house.use(lease, 0) is None
    assert house.use(lease, 1) == KEYS
    assert house.store.leased_chunks == 0
    assert len(house.leases) == 0
    assert not house.leases.end(lease, 0.0)


def test_a_load_keeps_its_chunks_when_the_lease_ends(house: House) -> None:
    lease = house.open()
    chunks = house.leases.use(lease, space(0), KEYS, 0.0)
    assert chunks is not None
    assert house.leases.end(lease, 0.0)
    house.store.clear()
    assert house.store.used_bytes == 3 * 64
    house.store.give_back(chunks)
    assert house.store.used_bytes == 0


def test_a_lease_holds_what_was_cleared(house: House) -> None:
    lease = house.open()
    house.store.clear()
    assert house.use(lease, 0) == KEYS
    assert house.leases.end(lease, 0.0)
    assert house.store.used_bytes == 0


@pytest.mark.parametrize(
    ("namespace", "keys"),
    [
        (space(2), KEYS),
        (space(0, b"another layout"), KEYS),
        (space(0)._replace(model="another"), KEYS),
        (space(0), [b"x", *KEYS]),
        (space(0), []),
    ],
)
def test_what_a_lease_does_not_hold_uses_nothing(house: House, namespace: Namespace, keys: list[bytes]) -> None:
    lease = house.open()
    assert house.leases.use(lease, namespace, keys, 0.0) is None
    assert house.use(lease, 0) == KEYS


def test_a_load_gets_what_its_keys_have_in_common_with_the_lease(house: House) -> None:
    lease = house.open()
    assert house.use(lease, 0, keys=[b"a", b"x"]) == [b"a"]
    assert house.use(lease, 1, keys=[*KEYS, b"d"]) == KEYS


def test_a_share_holds_each_layout_and_is_used_as_one(house: House) -> None:
    other = space(0, b"other")
    lease = house.leases.open(OWNER, {0: {space(0): house.chunks[0], other: house.put(other)}}, 0.0)
    assert house.store.leased_chunks == 6
    chunks = house.leases.use(lease, other, KEYS, 0.0)
    assert chunks is not None
    house.store.give_back(chunks)
    assert (house.store.leased_chunks, len(house.leases)) == (0, 0)


def test_a_lease_ends_at_its_deadline(house: House) -> None:
    first, second = house.open(0.0), house.open(1.0)
    assert not house.leases.sweep(59.9)
    assert len(house.leases) == 2
    assert not house.leases.sweep(60.0)
    assert len(house.leases) == 1
    assert house.use(first, 0, 60.0) is None
    assert house.use(second, 0, 60.0) == KEYS
    assert not house.leases.sweep(1000.0)
    assert house.store.leased_chunks == 0


def test_an_expired_lease_is_ended_whether_swept_or_not(house: House) -> None:
    lease = house.open(0.0)
    assert house.use(lease, 0, 60.0) is None
    assert not house.leases.end(lease, 60.0)
    assert not house.leases.renew(lease, 60.0)
    assert house.store.leased_chunks == 6
    assert not house.leases.sweep(60.0)
    assert (house.store.leased_chunks, len(house.leases)) == (0, 0)


def test_a_sweep_gives_back_so_many_pins_and_says_whether_more_are_left() -> None:
    house = House(pass_pins=1)
    first, second, kept = house.open(0.0), house.open(0.0), house.open(1.0)
    assert house.leases.sweep(60.0)
    assert not house.leases.end(first, 60.0)
    assert len(house.leases) == 3  # a rank's share at a time
    assert house.leases.sweep(60.0)
    assert (len(house.leases), house.store.leased_chunks) == (2, 6)
    assert house.use(second, 1, 60.0) is None
    passes = 1
    while house.leases.sweep(60.0):
        passes += 1
    assert passes == 2
    assert house.use(kept, 0, 60.0) == KEYS
    assert house.leases.end(kept, 60.0)
    assert house.store.leased_chunks == 0


def test_the_end_of_an_owner_costs_nothing_and_its_leases_end_at_once() -> None:
    house = House(pass_pins=1)
    leases = [house.open() for _ in range(10)]
    assert house.leases.holds(OWNER)
    assert house.leases.end_owner(OWNER) == 10
    assert not house.leases.holds(OWNER)
    assert house.store.leased_chunks == 6
    assert not any(house.leases.end(lease, 0.0) for lease in leases)
    assert house.use(leases[3], 0) is None
    assert not house.leases.renew(leases[4], 0.0)
    again = house.open()  # the same secret, as if it were another
    passes = 1
    while house.leases.sweep(0.0):
        passes += 1
    assert passes == 20
    assert house.use(again, 0) == KEYS
    assert house.leases.end_owner(OWNER) == 1
    assert not house.leases.sweep(0.0)
    assert house.store.leased_chunks == 0


def test_an_owner_that_is_gone_for_good_gets_no_other_lease() -> None:
    house = House(remembered=2)
    lease = house.open()
    assert house.leases.end_owner(OWNER, for_good=True) == 1
    assert not house.leases.end(lease, 0.0)
    with pytest.raises(UnknownInstance):
        house.open()
    house.leases.end_owner(b"another", for_good=True)
    house.leases.end_owner(OWNER, for_good=True)
    house.leases.end_owner(b"a third", for_good=True)
    with pytest.raises(UnknownInstance):
        house.open()
    house.leases.end_owner(b"a fourth", for_good=True)
    assert house.use(house.open(), 0) == KEYS


def test_a_pass_counts_leases_too() -> None:
    house = House(max_per_owner=100)
    for _ in range(40):
        house.open()
    house.leases.end_owner(OWNER)
    passes = 1
    while house.leases.sweep(0.0):
        passes += 1
    assert passes == 3  # 40 leases of 64 + 6, a little over 1000 a pass


def test_renewing_moves_the_deadline(house: House) -> None:
    first, second = house.open(0.0), house.open(1.0)
    assert house.leases.renew(first, 30.0)
    assert not house.leases.sweep(61.0)
    assert len(house.leases) == 1
    assert house.leases.end(first, 61.0)
    assert not house.leases.renew(second, 61.0)
    assert not house.leases.renew("unknown", 0.0)


def test_renewing_takes_what_was_found_for_ranks_that_wait(house: House) -> None:
    lease = house.open(length=1)
    assert house.use(lease, 0) == KEYS[:1]
    assert house.leases.renew(lease, 1.0, {rank: house.share(rank, 3) for rank in (0, 1)})
    assert house.store.leased_chunks == 3
    assert house.use(lease, 0, 1.0) is None
    assert house.use(lease, 1, 1.0) == KEYS


def test_renewing_with_less_lets_go_of_the_rest(house: House) -> None:
    lease = house.open()
    assert house.leases.renew(lease, 1.0, {rank: house.share(rank, 2) for rank in (0, 1)})
    assert house.store.leased_chunks == 4


def test_a_lease_ends_with_its_owner(house: House) -> None:
    house.open()
    house.open()
    kept = house.open(owner=b"another")
    assert house.leases.end_owner(OWNER) == 2
    assert house.leases.end_owner(OWNER) == 0
    assert house.use(kept, 0) == KEYS


def test_an_owner_may_hold_so_many() -> None:
    house = House(max_per_owner=2)
    lease = house.open()
    house.open()
    with pytest.raises(ServerBusy) as caught:
        house.open()
    assert caught.value.fields["retry_after"] == 60.0
    assert house.store.leased_chunks == 6
    house.open(owner=b"another")
    house.leases.end(lease, 0.0)
    house.open()
