"""The bytes of a version that is out never change: neither in the code, nor on the page, nor in both together."""

import hashlib
import re
from pathlib import Path

import pytest

from lmlive.protocol import versions
from tests.protocol.shown import Vector, check_frame, check_packet, vectors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
FROZEN = {1: "9feabca70df218231fdafc98c88458d3ee35d8d13e671b7c3602ec9278470cdc"}
"""SHA-256 of the vectors of each version, as they went out with it. A line is added here and never changed."""


def frozen(version: int) -> str:
    return (ROOT / "tests" / "protocol" / "vectors" / f"version-{version}.md").read_text(encoding="utf-8")


SHOWN = [(version, vector) for version in FROZEN for vector in vectors(frozen(version))]


@pytest.mark.parametrize("version", FROZEN)
def test_the_frozen_copy_is_the_one_that_went_out(version: int) -> None:
    assert hashlib.sha256(frozen(version).encode()).hexdigest() == FROZEN[version]


def test_every_version_that_is_spoken_is_frozen() -> None:
    assert set(FROZEN) >= set(range(versions.SPOKEN.least, versions.SPOKEN.most + 1))


@pytest.mark.parametrize("version", FROZEN)
def test_the_page_still_shows_every_byte_of_it(version: int) -> None:
    found = re.findall(r"^```(?:vector|keys)\n.*?^```$", frozen(version), re.MULTILINE | re.DOTALL)
    assert len(found) > 30
    assert [block for block in found if block not in PAGE] == []


@pytest.mark.parametrize(("version", "vector"), SHOWN)
def test_a_frozen_vector_is_still_what_the_code_writes_and_reads(version: int, vector: Vector) -> None:
    if vector[0] == "tether":
        check_packet(vector)
    else:
        check_frame(vector, version)
