import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lmlive.cache.keys import chunk_keys
from lmlive.clock import MonotonicClock
from lmlive.errors import InvalidArgument, MessageTooLarge, RequestTimeout
from lmlive.worker import prompt as module
from lmlive.worker.crew import Crew
from lmlive.worker.hello import ServerFacts
from lmlive.worker.prompt import LONG, Prompt
from tests.worker.fake_server import LIMITS

FOREVER = float("inf")


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(MonotonicClock())
    yield made
    made.close()


def facts(chunk_tokens: int = 64, **limits: int) -> ServerFacts:
    return ServerFacts(7, chunk_tokens, 120.0, {**LIMITS, **limits}, None, 0, 0)


def make(token_ids: Any, salt: str = "s") -> Prompt:
    return Prompt(token_ids, len(token_ids), "a", salt)


async def hash_(prompt: Prompt, crew: Crew, told: ServerFacts | None) -> bytes:
    return await prompt.hash(told, crew, start_by=FOREVER)


async def test_another_chunk_size_makes_other_keys(crew: Crew) -> None:
    prompt = make(range(150))
    assert len(await hash_(prompt, crew, facts(64))) == 64
    assert len(await hash_(prompt, crew, facts(32))) == 128
    assert await hash_(prompt, crew, None) == b""


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda ids: ids])
async def test_a_long_prompt_has_the_keys_that_a_short_one_would_have(crew: Crew, kind: Any) -> None:
    token_ids = kind(range(LONG + 1000))
    expected = b"".join(chunk_keys(token_ids, chunk_tokens=64, adapter="a", salt="s"))
    assert await hash_(make(token_ids), crew, facts()) == expected


@pytest.mark.parametrize(("tokens", "on_the_loop"), [(LONG, True), (LONG + 1, False)])
async def test_a_long_prompt_is_hashed_off_the_loop(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, tokens: int, on_the_loop: bool
) -> None:
    threads = []

    def spy(*given: Any, **more: Any) -> list[bytes]:
        threads.append(threading.current_thread() is threading.main_thread())
        return chunk_keys(*given, **more)

    monkeypatch.setattr(module, "chunk_keys", spy)
    await hash_(make(list(range(tokens))), crew, facts())
    assert threads == [on_the_loop]


@pytest.mark.parametrize("length", [1, LONG + 1])
@pytest.mark.parametrize("wrong", ["a", -1, 2**32, 1.5])
@pytest.mark.parametrize("told", [None, facts(), facts(tokens=0)])
async def test_wrong_tokens_are_told_whatever_the_server(
    crew: Crew, length: int, wrong: Any, told: ServerFacts | None
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await hash_(make([1] * (length - 1) + [wrong]), crew, told)
    assert caught.value.field == "token_ids"


async def test_wrong_texts_are_told_without_a_server(crew: Crew) -> None:
    with pytest.raises(InvalidArgument):
        await hash_(make([1], salt=7), crew, None)  # type: ignore[arg-type]


async def test_a_prompt_that_grows_while_it_is_read_is_an_error_and_no_other_prompt(crew: Crew) -> None:
    token_ids = list(range(LONG + 1))
    prompt = make(token_ids)
    token_ids.append(7)
    with pytest.raises(InvalidArgument, match="stay"):
        await hash_(prompt, crew, facts())


async def test_one_that_is_too_long_is_refused_with_numbers_and_not_hashed(crew: Crew) -> None:
    prompt = make(range(150))
    with pytest.raises(MessageTooLarge) as caught:
        prompt.check_length(facts(tokens=127))
    assert (caught.value.size, caught.value.limit) == (128, 127)
    assert await hash_(prompt, crew, facts(tokens=127)) == b""
    prompt.check_length(facts(tokens=128))


async def test_a_long_one_waits_no_longer_than_its_deadline_for_a_thread(crew: Crew) -> None:
    go_on = threading.Event()
    tasks = [asyncio.ensure_future(crew.run(lambda: go_on.wait(10))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(RequestTimeout):
        await make(list(range(LONG + 1))).hash(facts(), crew, start_by=time.monotonic() + 0.01)
    go_on.set()
    assert await asyncio.gather(*tasks) == [True, True]
