import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.errors import InvalidPayload, LMLiveError, NotOwner
from lmlive.protocol.tether import (
    MAX_FDS,
    MAX_PACKET_BYTES,
    MAX_TABLE_FDS,
    Greeting,
    Offer,
    PoolGrant,
    PoolRequest,
    Receipt,
    decode_answer,
    decode_word,
    encode_refusal,
)
from lmlive.protocol.verbs import Role
from tests.protocol import strategies

SECRET = b"s" * 16


@given(epoch=strategies.u64)
def test_a_greeting_comes_back(epoch: int) -> None:
    assert Greeting.decode(Greeting(epoch).encode()) == Greeting(epoch)


@given(
    offer=st.builds(
        Offer,
        secret=strategies.secrets,
        instance_id=strategies.u64,
        role=st.sampled_from(Role),
        first=st.integers(0, MAX_TABLE_FDS - MAX_FDS),
        count=st.integers(0, MAX_FDS),
    )
)
def test_an_offer_comes_back(offer: Offer) -> None:
    assert Offer.decode(offer.encode()) == offer


@given(received=strategies.u32)
def test_a_receipt_comes_back(received: int) -> None:
    assert decode_answer(Receipt(received).encode()) == Receipt(received)


@given(wish=st.builds(PoolRequest, secret=strategies.secrets, instance_id=strategies.u64, role=st.sampled_from(Role)))
def test_a_wish_for_the_pool_comes_back_and_is_no_offer(wish: PoolRequest) -> None:
    assert decode_word(wish.encode()) == wish
    with pytest.raises(InvalidPayload):
        Offer.decode(wish.encode())


@given(nbytes=st.integers(1, 2**63 - 1), count=st.integers(0, MAX_FDS))
def test_a_grant_comes_back(nbytes: int, count: int) -> None:
    assert decode_answer(PoolGrant(nbytes, count).encode()) == PoolGrant(nbytes, count)


def test_a_refusal_comes_back_as_the_error() -> None:
    answer = decode_answer(encode_refusal(NotOwner("uid 5 is refused", peer_uid=5)))
    assert isinstance(answer, NotOwner)
    assert (str(answer), answer.peer_uid) == ("uid 5 is refused", 5)


def test_a_refusal_with_endless_fields_fits_a_packet() -> None:
    packet = encode_refusal(NotOwner("no", names=["ä" * 4096] * 64))
    assert len(packet) <= MAX_PACKET_BYTES
    answer = decode_answer(packet)
    assert (type(answer), str(answer)) == (NotOwner, "no")


@given(packet=st.binary(max_size=100))
def test_any_packet_is_a_message_or_an_invalid_payload(packet: bytes) -> None:
    for decode in (Greeting.decode, decode_word, decode_answer):
        try:
            answer = decode(packet)
        except InvalidPayload as error:
            assert error.verb in ("tether greeting", "tether offer", "tether pool request", "tether answer")
        else:
            assert isinstance(answer, Greeting | Offer | PoolRequest | PoolGrant | Receipt | LMLiveError)


@pytest.mark.parametrize(
    "values",
    [
        {"secret": b"short"},
        {"instance_id": -1},
        {"role": 4},
        {"role": 0},
        {"count": 65},
        {"count": -1},
        {"first": MAX_TABLE_FDS},
        {"first": MAX_TABLE_FDS - 1, "count": 2},
    ],
)
def test_an_offer_outside_its_rules_is_refused(values: dict[str, object]) -> None:
    fields: dict[str, object] = {"secret": SECRET, "instance_id": 1, "role": 1, "first": 0, "count": 1, **values}
    packet = Offer(**fields).encode()  # type: ignore[arg-type]
    with pytest.raises(InvalidPayload):
        Offer.decode(packet)
