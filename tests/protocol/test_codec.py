import struct
import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmlive.errors import (
    BY_CODE,
    InternalError,
    InvalidPayload,
    LMLiveError,
    NotOwner,
    ProtocolError,
    StaleGeneration,
)
from lmlive.protocol import codec
from lmlive.protocol.codec import Header, decode_body, decode_header, encode_error, encode_reply, encode_request
from lmlive.protocol.messages import parse_error, parse_request
from lmlive.protocol.verbs import Verb
from tests.protocol import strategies

PING = encode_request(Verb.PING, 7, [5], epoch=9, instance_id=5, generation=2)


def request_body(body: bytes) -> bytes:
    return PING[:48] + body


def read(frame: bytes) -> object:
    """Do all that a server does with a frame's bytes."""
    header = decode_header(frame)
    return parse_request(header.code, decode_body(frame))


def test_the_header_has_48_bytes_in_fixed_places() -> None:
    assert struct.calcsize(codec.HEADER_FORMAT) == codec.HEADER_BYTES == 48
    frame = encode_request(5, 1, [], epoch=2, instance_id=3, generation=4, deadline_ns=-5)
    assert frame[:8] == b"LML1\x01\x00\x05\x00"
    assert [int.from_bytes(frame[at : at + 8], "little") for at in (8, 16, 24, 32)] == [1, 2, 3, 4]
    assert int.from_bytes(frame[40:48], "little", signed=True) == -5
    assert frame[48:] == b"\x90"


@given(header=strategies.headers, payload=strategies.payloads)
def test_a_request_comes_back_as_it_was_sent(header: Header, payload: list[object]) -> None:
    request = {name: value for name, value in header._asdict().items() if name not in ("version", "kind", "code")}
    plain = [value for value in payload if not holds_map(value)]
    frame = encode_request(header.code, payload=plain, **request)
    assert decode_header(frame) == decode_header(memoryview(frame)) == header
    assert repr(decode_body(frame)) == repr(decode_body(memoryview(frame))) == repr(plain)


@given(header=strategies.headers, payload=strategies.payloads)
def test_a_reply_comes_back_as_it_was_sent(header: Header, payload: list[object]) -> None:
    frame = encode_reply(
        header.request_id, header.epoch, header.instance_id, header.generation, payload, code=header.code
    )
    assert decode_header(frame) == header._replace(kind=codec.REPLY, deadline_ns=0)
    assert repr(decode_body(frame)) == repr(payload)


def holds_map(value: object) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(holds_map, value)))


def test_a_pong_is_the_reply_true() -> None:
    assert codec.encode_pong(1, 2, 3, 4) == encode_reply(1, 2, 3, 4, [True])


@pytest.mark.parametrize(
    "frame", [b"", PING[:47], b"\0" * 48, b"LML2" + PING[4:], b"GET / HTTP/1.1\r\nHost: " + b"a" * 60]
)
def test_what_has_no_header_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_header(frame)
    assert type(caught.value) is ProtocolError


def test_the_header_of_another_version_or_kind_is_legible() -> None:
    frame = PING[:4] + b"\xff\x07" + PING[6:]
    assert decode_header(frame)[:3] == (255, 7, Verb.PING)
    assert decode_header(frame).request_id == 7


@given(frame=st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_protocol_error(frame: bytes) -> None:
    with suppress(ProtocolError):
        decode_header(frame)


@given(body=st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\x91")
@example(b"\xa1\xff")  # not UTF-8
@example(b"\xd6\xff\0\0\0\0")  # a timestamp
@example(b"\xc7\x00\xff")  # an empty timestamp
@example(b"\xc7\x00\x05")  # an empty extension
@example(b"\x91" * 299)
def test_any_body_is_a_list_or_an_invalid_payload(body: bytes) -> None:
    for frame in (request_body(body), encode_reply(1, 0, 0, 0, [])[:48] + body):
        try:
            assert type(decode_body(frame)) is list
        except InvalidPayload as error:
            assert error.verb in ("PING", "reply")


@given(message=strategies.requests, edit=st.data())
def test_a_broken_frame_is_a_message_or_a_protocol_error(message: Any, edit: st.DataObject) -> None:
    whole = encode_request(message.verb, 1, message.to_payload(), epoch=2, instance_id=3, generation=4)
    frame = bytearray(whole)
    match edit.draw(st.sampled_from(["flip", "cut", "extend", "overwrite"])):
        case "flip":
            for bit in edit.draw(st.lists(st.integers(0, len(frame) * 8 - 1), min_size=1, max_size=4)):
                frame[bit // 8] ^= 1 << bit % 8
        case "cut":
            del frame[edit.draw(st.integers(0, len(frame) - 1)) :]
        case "extend":
            frame += edit.draw(st.binary(min_size=1, max_size=20))
        case "overwrite":
            at = edit.draw(st.integers(0, len(frame) - 1))
            frame[at : at + 4] = edit.draw(st.binary(min_size=4, max_size=4))
    with suppress(ProtocolError):
        read(bytes(frame))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc3",  # true
        b"\x05",
        b"\x80",  # a map
        b"\xc0",
        b"\x91\xc3\xc3",  # trailing bytes
        b"\x91\xc3" * 2,
        b"\x92\xc3",  # an array cut short
        b"\x91" * 2000 + b"\xc0",  # a depth bomb
        b"\x91\x81\xa1a\x01",  # a map in a request
        b"\x91\xd4\x05\x00",  # an extension type
        b"\x91\xa2\xff\xfe",  # not UTF-8
        b"\x91\xd9\xff",  # a string cut short
        b"\xdc\x10\x01" + b"\xc0" * 4097,  # one item too many
        b"\x91\xda\x10\x01" + b"a" * 4097,  # one byte too many
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdd\xff\xff\xff\xff",
        b"\x91\xc6\xff\xff\xff\xff",
        b"\x91\xdb\xff\xff\xff\xff",
        b"\x91\xdf\xff\xff\xff\xff",
    ],
)
def test_an_illegible_body_is_an_invalid_payload(body: bytes) -> None:
    with pytest.raises(InvalidPayload) as caught:
        decode_body(request_body(body))
    assert caught.value.verb == "PING"
    assert caught.value.position == "body"
    assert caught.value.got


def test_a_request_may_be_as_long_as_its_limits() -> None:
    longest: list[object] = [["a" * codec.MAX_TEXT_BYTES], [None] * codec.MAX_ITEMS, b"b" * 2_000_000]
    assert decode_body(encode_request(5, 1, longest)) == longest


def test_a_body_without_a_header_is_an_invalid_payload() -> None:
    with pytest.raises(InvalidPayload):
        decode_body(b"\x91\xc3")


@pytest.mark.parametrize("array", [b"\xdc\x10\x00", b"\xdd\x00\x00\x10\x00"])
def test_announced_lengths_do_not_take_memory_beyond_the_frame(array: bytes) -> None:
    # A thousand arrays inside each other, each announcing as many items as may be.
    frame = request_body(array * 1000 + b"\xc0" * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload):
            decode_body(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@pytest.mark.parametrize("frame", [request_body(b""), encode_reply(1, 0, 0, 0, [])[:48]])
@pytest.mark.parametrize("array", [b"\xdc\x10\x00", b"\xdc\xff\xff", b"\xdc\x01\x2c", b"\xdd\x00\x00\x10\x00"])
def test_a_short_frame_cannot_announce_much(frame: bytes, array: bytes) -> None:
    bomb = frame + array * 600
    tracemalloc.start()
    try:
        with pytest.raises(InvalidPayload):
            decode_body(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1000 * len(bomb)


@pytest.mark.parametrize("count", [64, 65, 4096])
def test_as_many_handles_as_may_be_come_in_the_shortest_words(count: int) -> None:
    handles: list[object] = [["fd", 0, 1]] * count
    assert decode_body(encode_request(Verb.REGISTER, 1, [handles])) == [handles]
    assert decode_body(encode_request(Verb.REGISTER, 1, [[None] * 64])) == [[None] * 64]


def test_a_reply_may_hold_a_map_and_ten_thousand_events() -> None:
    events: list[object] = [[{"seq": number, "kind": "reaped"} for number in range(10_000)]]
    assert decode_body(encode_reply(1, 0, 0, 0, events)) == events


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_crosses_the_wire(code: int) -> None:
    frame = encode_error(1, 2, 3, 4, BY_CODE[code]("do this", generation=5, names=["a", "b"]))
    header = decode_header(frame)
    assert header == Header(1, codec.REPLY, code, 1, 2, 3, 4, 0)
    error = parse_error(code, decode_body(frame))
    assert type(error) is BY_CODE[code]
    assert (str(error), error.fields) == ("do this", {"generation": 5, "names": ["a", "b"]})


def test_a_foreign_exception_crosses_as_an_internal_error_without_its_text() -> None:
    frame = encode_error(1, 2, 3, 4, ZeroDivisionError("a secret"))
    assert decode_header(frame).code == InternalError.code
    assert b"a secret" not in frame
    assert parse_error(1, decode_body(frame)).type == "ZeroDivisionError"


def deep() -> object:
    nest: list[object] = []
    for _ in range(5000):
        nest = [nest]
    return nest


@pytest.mark.parametrize("value", [b"\xff", "\udc80", 2**200, -(2**64), float("nan"), object(), {1: 2}, deep()])
def test_an_error_reaches_the_peer_whatever_it_carries(value: object) -> None:
    frame = encode_error(1, 2, 3, 4, NotOwner("refused \udc80", value=value))
    header = decode_header(frame)
    error = parse_error(header.code, decode_body(frame))
    assert type(error) in (NotOwner, InternalError)


def test_an_unknown_error_code_is_a_refusal() -> None:
    error = parse_error(999, ["try later", {"why": "new"}])
    assert isinstance(error, LMLiveError)
    assert error.fields["why"] == "new"


@pytest.mark.parametrize("payload", [[], ["a"], ["a", {}, 1], [1, {}], ["a", []], ["a", {b"b": 1}], ["a" * 20_000, {}]])
def test_an_error_reply_of_another_form_is_an_invalid_payload(payload: list[object]) -> None:
    with pytest.raises(InvalidPayload):
        parse_error(StaleGeneration.code, payload)


def test_replies_of_two_threads_do_not_mix() -> None:
    # Nothing is shared between calls: the encoder has no state to mix.
    assert not [name for name, value in vars(codec).items() if isinstance(value, msgpack.Packer)]
