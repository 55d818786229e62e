"""A part of the fuzz; ``make fuzz`` is the whole. Seeds are fixed, so that a change is to blame for what it breaks."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fuzz.drive import fuzz, fuzz_and_shrink, shrink
from tests.fuzz.messages import Facts, make
from tests.fuzz.parsing import parse_many
from tests.fuzz.workers import fuzz_workers


def quietly(_: str) -> None:
    """Say nothing."""


@pytest.mark.may_block
@pytest.mark.parametrize("seed", [1, 2])
async def test_ten_thousand_messages_harm_nobody(run_dir: Path, seed: int) -> None:
    found = await fuzz(run_dir / "s", seed, range(10_000), tethers=200, said=quietly)
    assert found["messages"] == 10_000
    assert min(found["requests"], found["illegible"]) > 1000
    assert found["tether_packets"] >= 190
    assert len(found["replies"]) > 10
    assert found["rounds_of_the_witness"] > 5


@pytest.mark.may_block
async def test_a_fault_is_found_and_shrunk_to_its_one_message(run_dir: Path) -> None:
    found = await fuzz_and_shrink(run_dir, 1, range(200), settings={"goes_wrong": True}, said=quietly)
    assert "InternalError" in found["finding"] or "an internal error" in found["finding"]
    [at] = found["messages"]
    assert make(1, at, Facts(0, bytes(16), 0))[0][6] == 9  # PREPARE_STORE
    assert found["runs"] >= 1


async def test_shrinking_ends_with_the_few_that_it_takes() -> None:
    async def fails(numbers: Sequence[int]) -> bool:
        return {17, 803} <= set(numbers)

    assert await shrink(range(1000), fails) == [17, 803]

    async def always(numbers: Sequence[int]) -> bool:
        return True

    assert len(await shrink(range(1000), always)) == 1


def test_a_seed_and_a_number_make_the_same_message_again() -> None:
    facts = Facts(5, b"s" * 16, 7, 2)
    assert [make(3, number, facts) for number in range(500)] == [make(3, number, facts) for number in range(500)]
    assert make(3, 1, facts) != make(4, 1, facts)


def test_whatever_the_bytes_the_codec_gives_a_value_or_a_typed_error() -> None:
    found = parse_many(1, 10_000)
    assert "finding" not in found, found
    assert len(found["ended"]) > 40


@pytest.mark.may_block
@pytest.mark.parametrize("seed", [1, 2])
async def test_before_a_server_without_manners_the_library_gives_results_and_typed_errors(
    run_dir: Path, seed: int
) -> None:
    found = await fuzz_workers(run_dir, seed, 200)
    assert "finding" not in found, found
    assert found["replies"] >= 200
