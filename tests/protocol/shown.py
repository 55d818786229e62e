"""The blocks in which a page shows bytes of the wire, and whether the code agrees with them."""

import ast
import re

import pytest

from lmlive.protocol import codec, tether
from lmlive.protocol.codec import decode_body, decode_header, encode_reply, encode_request
from lmlive.protocol.messages import parse_error, parse_reply, parse_request
from lmlive.protocol.verbs import Verb

Vector = tuple[str, str, dict[str, int], list[object], bytes]
"""Name, kind, header fields, payload, and the bytes of it all."""


def blocks(page: str, kind: str) -> list[list[str]]:
    """Give the blocks of one kind, line by line."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in found]


def vectors(page: str) -> list[Vector]:
    """Read all vectors of a page."""
    found = []
    for title, payload, *hexadecimal in blocks(page, "vector"):
        name, kind, *fields = title.replace("pool ", "pool_").split()
        numbers = {key: int(value, 0) for key, value in (field.split("=") for field in fields)}
        found.append((name, kind, numbers, _literal(payload), bytes.fromhex("".join(hexadecimal))))
    return found


def check_frame(vector: Vector, version: int) -> None:
    """Encode and decode the vector of a message in both directions."""
    name, kind, fields, payload, frame = vector
    header = decode_header(frame)
    assert header.version == version
    stated = {field: value for field, value in header._asdict().items() if value and field not in ("version", "kind")}
    body = decode_body(frame)
    assert repr(body) == repr(payload)
    if kind == "request":
        assert stated == {**fields, "code": Verb[name]}
        rest = {key: value for key, value in fields.items() if key != "request_id"} | {"version": version}
        assert encode_request(Verb[name], fields["request_id"], payload, **rest) == frame
        message = parse_request(header.code, body)
        assert encode_request(header.code, fields["request_id"], message.to_payload(), **rest) == frame
        return
    assert kind == "reply"
    assert stated == fields
    assert header.kind == codec.REPLY
    senders = (header.request_id, header.epoch, header.instance_id, header.generation)
    assert encode_reply(*senders, payload, code=header.code, version=version) == frame
    if name == "error":
        assert codec.encode_error(*senders, parse_error(header.code, body), version=version) == frame
        return
    result = parse_reply(Verb[name], body)
    again: list[object] = result.to_payload() if hasattr(result, "to_payload") else [result]
    assert encode_reply(*senders, again, version=version) == frame
    if name == "PING":
        assert codec.encode_pong(*senders, version) == frame


def check_packet(vector: Vector) -> None:
    """Encode and decode the vector of a packet of the tether."""
    _, kind, _, _, packet = vector
    match kind:
        case "greeting":
            assert tether.Greeting.decode(packet).encode() == packet
        case "offer":
            assert tether.Offer.decode(packet).encode() == packet
        case "receipt":
            receipt = tether.decode_answer(packet)
            assert isinstance(receipt, tether.Receipt)
            assert receipt.encode() == packet
        case "pool_request":
            assert tether.PoolRequest.decode(packet).encode() == packet
        case "pool_grant":
            grant = tether.decode_answer(packet)
            assert isinstance(grant, tether.PoolGrant)
            assert grant.encode() == packet
        case "refusal":
            error = tether.decode_answer(packet)
            assert not isinstance(error, tether.Receipt | tether.PoolGrant)
            assert error.code == 24
            assert tether.encode_refusal(error) == packet
        case _:
            pytest.fail(f"unknown packet {kind}")


def _literal(text: str) -> list[object]:
    with_bytes = re.sub(r"h'([0-9a-f]*)'", lambda match: repr(bytes.fromhex(match[1])), text)
    value = ast.literal_eval(with_bytes)
    assert isinstance(value, list)
    return value
