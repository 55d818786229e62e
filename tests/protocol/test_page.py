"""docs/protocol.md says what the code does: each number, each rule that is a number, each byte."""

import hashlib
import re
import struct
from pathlib import Path

import msgpack
import pytest

from lmlive.cache.keys import chunk_keys, salt_tag
from lmlive.errors import BY_CODE
from lmlive.protocol import codec, parts, replies, tether, transfers
from lmlive.protocol.messages import MODES
from lmlive.protocol.verbs import FENCED, FENCED_BY_EPOCH, TOUCHING, Role, Verb
from tests.protocol.shown import Vector, blocks, check_frame, check_packet, vectors

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(first_column: str) -> list[list[str]]:
    """Give the rows of the table whose header begins with this column."""
    lines = iter(PAGE.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


FRAMES = [vector for vector in vectors(PAGE) if vector[0] != "tether"]
PACKETS = [vector for vector in vectors(PAGE) if vector[0] == "tether"]


@pytest.mark.parametrize("vector", FRAMES)
def test_a_vector_encodes_and_decodes_exactly(vector: Vector) -> None:
    check_frame(vector, codec.VERSION)


def test_each_verb_of_this_build_has_a_request_and_a_reply() -> None:
    shown = {(name, kind) for name, kind, *_ in FRAMES}
    wanted = {(verb.name, kind) for verb in Verb for kind in ("request", "reply")}
    assert shown == wanted | {("error", "reply")}


@pytest.mark.parametrize("vector", PACKETS)
def test_a_tether_vector_encodes_and_decodes_exactly(vector: Vector) -> None:
    assert msgpack.packb(vector[3]) == vector[4]
    check_packet(vector)


def test_every_packet_of_the_tether_is_shown() -> None:
    assert [kind.replace("_", " ") for _, kind, *_ in PACKETS] == [row[0] for row in table("packet")]


def test_the_header_table_is_the_struct() -> None:
    at = 0
    for (offset, size, _name, _), code in zip(table("offset"), ("4s", *"BBHQQQQq"), strict=True):
        assert (int(offset), int(size)) == (at, struct.calcsize(f"<{code}"))
        at += int(size)
    assert f"`{codec.HEADER_FORMAT}`" in PAGE
    assert at == codec.HEADER_BYTES
    assert [row[2] for row in table("offset")] == ["magic", *codec.Header._fields]


def test_the_verb_table_is_the_enum() -> None:
    rows = table("number")
    assert [(int(row[0]), row[1]) for row in rows] == [(int(verb), verb.name) for verb in Verb]
    for row in rows:
        verb = Verb[row[1]]
        fence = "instance" if verb in FENCED else "epoch" if verb in FENCED_BY_EPOCH else "nothing"
        assert row[4] == fence
        assert row[5] == ("yes" if verb in TOUCHING else "no")


def test_the_verb_table_counts_the_payload() -> None:
    requests = {name: payload for name, kind, _, payload, _ in FRAMES if kind == "request"}
    results = {name: payload for name, kind, _, payload, _ in FRAMES if kind == "reply"}
    for row in table("number"):
        for column, shown in ((2, requests), (3, results)):
            if row[1] in shown:
                assert len(shown[row[1]]) == len([name for name in row[column].strip("[]").split(",") if name])


def test_the_error_table_is_the_exceptions() -> None:
    rows = {int(code): name.strip("`") for code, name, _ in table("code")}
    assert rows == {code: error.__name__ for code, error in BY_CODE.items()}


def test_the_limits_are_the_constants() -> None:
    rules = {name: rule for name, rule in table("value")}  # noqa: C416 - two cells of a row
    assert rules["arrays in a request"] == (
        f"at most {codec.MAX_ITEMS} items; of more than {codec.FEW_ITEMS}, "
        f"at most one for each {codec.ITEM_BYTES} bytes of the body"
    )
    assert rules["strings in a request"] == f"at most {codec.MAX_TEXT_BYTES} bytes of UTF-8"
    assert rules["role"] == ", ".join(f"{int(role)} {role.name.lower()}" for role in Role)
    assert rules["world_size"] == f"1 to {transfers.MAX_RANKS}"
    assert rules["mode"] == "`{}`, `{}` or `{}`".format(*MODES)
    assert f"at most {parts.MAX_GROUPS}," in rules["groups"]
    assert f"at most {parts.MAX_PLANES} planes" in rules["groups"]
    assert f"at most {parts.MAX_AXES}," in rules["in_block_shape, stride_order"]
    assert f"at most {parts.MAX_HANDLES}," in rules["handles"]
    assert f"at most {parts.MAX_UUID_BYTES} bytes" in rules["handles"]
    assert f"{parts.CUDA_HANDLE_BYTES} bytes" in rules["handles"]
    assert rules["keys"].startswith(f"{transfers.KEY_BYTES} bytes")
    assert rules["tag"].startswith(f"{transfers.TAG_BYTES} bytes")
    assert rules["layout_key"].startswith(f"{replies.LAYOUT_KEY_BYTES} bytes")
    assert all(f"`{name}`" in rules["limits"] for name in replies.LIMIT_NAMES)
    assert f"at most {tether.MAX_FDS} |" in PAGE
    assert f"at most {tether.MAX_TABLE_FDS} places" in PAGE
    assert f"at most {tether.MAX_PACKET_BYTES:,} bytes" in PAGE


@pytest.mark.parametrize("block", blocks(PAGE, "keys"))
def test_the_golden_keys_are_the_chain(block: list[str]) -> None:
    title, *rows = block
    stated = re.fullmatch(r"adapter='(.*)' salt='(.*)' chunk_tokens=(\d+) tokens=0\.\.(\d+)", title)
    assert stated is not None
    adapter, salt, chunk, last = stated[1], stated[2], int(stated[3]), int(stated[4])
    hexes = dict(row.split() for row in rows)

    key = hashlib.sha256(b"lmlive/1" + msgpack.packb([adapter, salt])).digest()
    assert hexes["k0"] == key.hex()
    chain = []
    for start in range(0, last + 1, chunk):
        key = hashlib.sha256(key + struct.pack(f"<{chunk}I", *range(start, start + chunk))).digest()
        chain.append(key)
    assert [hexes[f"k{at}"] for at in range(1, len(chain) + 1)] == [key.hex() for key in chain]
    assert hexes["tag"] == (hashlib.sha256(salt.encode()).digest()[:16] if salt else bytes(16)).hex()

    assert chunk_keys(range(last + 1), chunk_tokens=chunk, adapter=adapter, salt=salt) == chain
    assert salt_tag(salt).hex() == hexes["tag"]


def test_one_sentence_a_line() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if line and not line.startswith(("|", "#"))]
    assert all(line.endswith(".") for line in lines)
    assert not [line for line in lines if re.search(r"\. [A-Z]", line)]
