import pytest

from lmlive.cache.keys import chunk_keys, salt_tag
from lmlive.errors import MessageTooLarge
from lmlive.protocol.messages import Retrieve, Store
from lmlive.protocol.verbs import Verb
from lmlive.testing import ManualClock
from lmlive.worker.blocks import Shape, check_blocks
from lmlive.worker.crew import Crew
from lmlive.worker.hello import ServerFacts
from lmlive.worker.order import Order
from lmlive.worker.prompt import Prompt
from tests.worker.fake_server import LIMITS


def facts(chunk_tokens: int = 64, **limits: int) -> ServerFacts:
    return ServerFacts(7, chunk_tokens, 120.0, {**LIMITS, **limits}, None, 0, 0)


CREW = Crew(ManualClock())  # short prompts need no thread


def order(verb: Verb = Verb.STORE, tokens: int = 150, skip: int = 0, lease: str | None = None) -> Order:
    blocks = check_blocks((Shape(16, 64),), range(-(-tokens // 16)), tokens, skip)
    prompt = Prompt(list(range(tokens)), tokens, "a", "s")
    return Order(verb=verb, prompt=prompt, blocks=blocks, lease=lease, deadline=1.0)


async def test_a_store_is_what_the_wire_takes() -> None:
    message = Store.from_payload(await order(skip=32).payload(facts(), CREW))
    assert message.keys == b"".join(chunk_keys(range(150), chunk_tokens=64, adapter="a", salt="s"))
    assert len(message.keys) == 64
    assert len(message.blocks[0]) == 8 * 4
    assert message.skip_tokens == 32
    assert message.tag == salt_tag("s")


async def test_a_retrieve_carries_its_lease() -> None:
    message = Retrieve.from_payload(await order(Verb.RETRIEVE, lease="l").payload(facts(), CREW))
    assert message.lease == "l"
    assert Retrieve.from_payload(await order(Verb.RETRIEVE).payload(facts(), CREW)).lease is None


async def test_the_limits_of_the_server_are_kept() -> None:
    with pytest.raises(MessageTooLarge) as tokens:
        await order().payload(facts(tokens=127), CREW)
    assert (tokens.value.size, tokens.value.limit) == (128, 127)
    with pytest.raises(MessageTooLarge) as blocks:
        await order().payload(facts(blocks=7), CREW)
    assert (blocks.value.size, blocks.value.limit) == (8, 7)
    await order().payload(facts(tokens=128, blocks=8), CREW)


def test_what_has_no_whole_chunk_is_empty() -> None:
    assert order(tokens=63).is_empty(64)
    assert not order(tokens=64).is_empty(64)
    assert not order(tokens=64, skip=64).is_empty(64)  # a store still touches what is held
    assert order(Verb.RETRIEVE, tokens=64, skip=64).is_empty(64)
