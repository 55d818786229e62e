from typing import Any

import pytest

from lmlive.cache.keys import chunk_keys, salt_tag
from lmlive.errors import InvalidArgument, MessageTooLarge
from lmlive.protocol.messages import Retrieve, Store
from lmlive.protocol.verbs import Verb
from lmlive.worker.blocks import Shape, check_blocks
from lmlive.worker.hello import ServerFacts
from lmlive.worker.order import ANY_CHUNK, Order
from tests.worker.fake_server import LIMITS


def facts(chunk_tokens: int = 64, **limits: int) -> ServerFacts:
    return ServerFacts(7, chunk_tokens, 120.0, {**LIMITS, **limits}, None, 0, 0)


def order(verb: Verb = Verb.STORE, tokens: int = 150, skip: int = 0, **more: Any) -> Order:
    blocks = check_blocks((Shape(16, 64),), range(-(-tokens // 16)), tokens, skip)
    given = {"token_ids": list(range(tokens)), "adapter": "a", "salt": "s", "deadline": 1.0, **more}
    return Order(verb=verb, blocks=blocks, **given)


def test_a_store_is_what_the_wire_takes() -> None:
    message = Store.from_payload(order(skip=32).payload(facts()))
    assert message.keys == b"".join(chunk_keys(range(150), chunk_tokens=64, adapter="a", salt="s"))
    assert len(message.keys) == 64
    assert len(message.blocks[0]) == 8 * 4
    assert message.skip_tokens == 32
    assert message.tag == salt_tag("s")


def test_a_retrieve_carries_its_lease() -> None:
    message = Retrieve.from_payload(order(Verb.RETRIEVE, lease="l").payload(facts()))
    assert message.lease == "l"
    assert Retrieve.from_payload(order(Verb.RETRIEVE).payload(facts())).lease is None


def test_another_chunk_size_makes_other_keys() -> None:
    made = order()
    assert len(made.keys(64)) == 64
    assert len(made.keys(32)) == 128
    assert made.keys(ANY_CHUNK) == b""


@pytest.mark.parametrize("wrong", [["a"], [-1], [2**32], [1.5]])
def test_wrong_tokens_are_told_without_a_server(wrong: list[Any]) -> None:
    with pytest.raises(InvalidArgument):
        order(tokens=1, token_ids=wrong).keys(ANY_CHUNK)


def test_wrong_texts_are_told_without_a_server() -> None:
    with pytest.raises(InvalidArgument):
        order(salt=7).keys(ANY_CHUNK)


def test_the_limits_of_the_server_are_kept() -> None:
    with pytest.raises(MessageTooLarge):
        order().payload(facts(tokens=127))
    with pytest.raises(MessageTooLarge):
        order().payload(facts(blocks=7))
    order().payload(facts(tokens=128, blocks=8))


def test_what_has_no_whole_chunk_is_empty() -> None:
    assert order(tokens=63).is_empty(64)
    assert not order(tokens=64).is_empty(64)
    assert not order(tokens=64, skip=64).is_empty(64)  # a store still touches what is held
    assert order(Verb.RETRIEVE, tokens=64, skip=64).is_empty(64)
