from typing import Any

import pytest
from hypothesis import given

from lmlive.errors import InvalidPayload, ProtocolError, UnknownVerb
from lmlive.protocol import messages as m
from lmlive.protocol.codec import decode_body, decode_header, encode_request
from lmlive.protocol.verbs import Role, Verb
from tests.protocol import strategies

SECRET = b"s" * 16
KEY = b"k" * 32
TAG = bytes(16)
BLOCKS = b"\x01\0\0\0"
PLANE: list[object] = [0, 0, 64, 64, [2, 4], [0, 1]]
GROUP: list[object] = [16, 8, [PLANE]]
FD: list[object] = ["fd", 0, 512]
CUDA: list[object] = ["cuda", b"h" * 64, "GPU-1", 512]
REGISTER: list[object] = [SECRET, "m", "", 0, 1, "float32", "", "server_driven", "shm", [GROUP], [FD]]


def changed(payload: list[object], *path: int, to: object) -> list[object]:
    """Give a copy of a payload with one value replaced."""
    first, *rest = path
    copy = list(payload)
    inner = copy[first]
    copy[first] = changed(inner, *rest, to=to) if rest and isinstance(inner, list) else to
    return copy


@given(message=strategies.requests)
def test_every_request_comes_back_as_it_was_sent(message: Any) -> None:
    frame = encode_request(message.verb, 1, message.to_payload())
    read = m.parse_request(decode_header(frame).code, decode_body(frame))
    assert read == message
    assert type(read) is type(message)
    assert encode_request(message.verb, 1, read.to_payload()) == frame


@given(payload=strategies.payloads)
def test_any_payload_is_a_message_or_an_invalid_payload(payload: list[object]) -> None:
    for verb in Verb:
        try:
            message = m.parse_request(verb, payload)
        except InvalidPayload as error:
            assert error.verb == verb.name
            assert {"position", "expected", "got"} <= error.fields.keys()
        else:
            assert message.to_payload() == payload


@pytest.mark.parametrize("verb", [0, 18, 20, 29, 99, 65_535])
def test_an_unknown_verb_is_named(verb: int) -> None:
    with pytest.raises(UnknownVerb) as caught:
        m.parse_request(verb, [])
    assert caught.value.verb == verb


def test_an_engine_that_copies_by_itself_brings_no_handles() -> None:
    payload = changed(changed(REGISTER, 10, to=[]), 7, to="engine_driven")
    assert m.parse_request(Verb.REGISTER, payload).to_payload() == payload
    with pytest.raises(InvalidPayload):
        m.parse_request(Verb.REGISTER, changed(payload, 9, 0, 2, 0, 0, to=1))


def test_there_is_a_message_for_every_verb() -> None:
    for verb in Verb:
        with pytest.raises(InvalidPayload):
            m.parse_request(verb, [None] * 20)


BAD: list[tuple[Verb, list[object], int | str]] = [
    (Verb.HELLO, [], "payload"),
    (Verb.HELLO, [1, 1, 1, "s", SECRET, 0], "payload"),
    (Verb.HELLO, [True, 1, 1, "s", SECRET], 0),
    (Verb.HELLO, [1, 256, 1, "s", SECRET], 1),
    (Verb.HELLO, [1, 1, 4, "s", SECRET], 2),
    (Verb.HELLO, [1, 1, 0, "s", SECRET], 2),
    (Verb.HELLO, [1, 1, 1, b"s", SECRET], 3),
    (Verb.HELLO, [1, 1, 1, "s" * 4097, SECRET], 3),
    (Verb.HELLO, [1, 1, 1, "ä" * 2049, SECRET], 3),
    (Verb.HELLO, [1, 1, 1, "s", b"short"], 4),
    (Verb.HELLO, [1, 1, 1, "s", "s" * 16], 4),
    (Verb.PING, [], "payload"),
    (Verb.PING, [1, 1], "payload"),
    (Verb.PING, [0], 0),
    (Verb.PING, [-1], 0),
    (Verb.PING, [2**64], 0),
    (Verb.PING, [True], 0),
    (Verb.PING, [1.0], 0),
    (Verb.PING, ["1"], 0),
    (Verb.REGISTER, REGISTER[:-1], "payload"),
    (Verb.REGISTER, changed(REGISTER, 0, to=b""), 0),
    (Verb.REGISTER, changed(REGISTER, 1, to=None), 1),
    (Verb.REGISTER, changed(REGISTER, 3, to=1), 3),
    (Verb.REGISTER, changed(REGISTER, 4, to=0), 4),
    (Verb.REGISTER, changed(REGISTER, 4, to=4097), 4),
    (Verb.REGISTER, changed(REGISTER, 7, to="auto"), 7),
    (Verb.REGISTER, changed(REGISTER, 7, to=["none"]), 7),
    (Verb.REGISTER, changed(REGISTER, 9, to=None), 9),
    (Verb.REGISTER, changed(REGISTER, 9, to=[GROUP] * 65), 9),
    (Verb.REGISTER, changed(REGISTER, 9, 0, to=[16, 8]), "9.0"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 0, to=0), "9.0.0"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 1, to=2**32), "9.0.1"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, to=[PLANE] * 4097), "9.0.2"),
    (Verb.REGISTER, changed(REGISTER, 9, to=[[16, 8, [PLANE] * 2049]] * 2), "9.1.2"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, to=7), "9.0.2.0"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 0, to=1), "9.0.2.0.0"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 1, to=-1), "9.0.2.0.1"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 1, to=2**63), "9.0.2.0.1"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 2, to=2**63), "9.0.2.0.2"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 3, to=False), "9.0.2.0.3"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 4, to=[1] * 33), "9.0.2.0.4"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 4, 1, to="4"), "9.0.2.0.4.1"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 5, to=[0]), "9.0.2.0.5"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 5, to=[0, 0]), "9.0.2.0.5"),
    (Verb.REGISTER, changed(REGISTER, 9, 0, 2, 0, 5, to=[1, 2]), "9.0.2.0.5"),
    (Verb.REGISTER, changed(REGISTER, 10, to=[FD] * 4097), 10),
    (Verb.REGISTER, changed(REGISTER, 10, 0, to=[]), "10.0"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, to=["file", "/etc/passwd", 1]), "10.0"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, to=[["fd"], 0, 1]), "10.0"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, to=["fd", 0]), "10.0"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, 1, to=2**32), "10.0.1"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, 2, to=0), "10.0.2"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, to=changed(CUDA, 1, to=b"h" * 63)), "10.0.1"),
    (Verb.REGISTER, changed(REGISTER, 10, 0, to=changed(CUDA, 2, to="g" * 97)), "10.0.2"),
    (Verb.REGISTER, changed(REGISTER, 10, to=[]), "9.0.2.0.0"),
    (Verb.UNREGISTER, [SECRET * 2], 0),
    (Verb.STORE, [KEY, [BLOCKS], 0], "payload"),
    (Verb.STORE, [KEY[:-1], [BLOCKS], 0, TAG], 0),
    (Verb.STORE, ["k" * 32, [BLOCKS], 0, TAG], 0),
    (Verb.STORE, [KEY, BLOCKS, 0, TAG], 1),
    (Verb.STORE, [KEY, [BLOCKS] * 65, 0, TAG], 1),
    (Verb.STORE, [KEY, [BLOCKS, b"\0"], 0, TAG], "1.1"),
    (Verb.STORE, [KEY, [[1, 2]], 0, TAG], "1.0"),
    (Verb.STORE, [KEY, [BLOCKS], -1, TAG], 2),
    (Verb.STORE, [KEY, [BLOCKS], 0, b""], 3),
    (Verb.RETRIEVE, [KEY, [BLOCKS], 0, b"lease"], 3),
    (Verb.RETRIEVE, [KEY, [BLOCKS], 2**63, None], 2),
    (Verb.LOOKUP, ["m", "", 0, KEY, None], 2),
    (Verb.LOOKUP, ["m", "", 4097, KEY, None], 2),
    (Verb.LOOKUP, ["m", "", 1, KEY + b"\0", None], 3),
    (Verb.LOOKUP, ["m", "", 1, KEY, 5], 4),
    (Verb.RELEASE, [None], 0),
    (Verb.PREPARE_STORE, [KEY, 0, b"tag"], 2),
    (Verb.COMMIT_STORE, ["lease", "sums"], 1),
    (Verb.PREPARE_RETRIEVE, [KEY, 0, 0], 2),
    (Verb.READ, ["lease", 0, 0], 2),
    (Verb.READ, ["lease", 0, (64 << 20) + 1], 2),
    (Verb.READ, ["lease", -1, 1], 1),
    (Verb.WRITE, ["lease"], "payload"),
    (Verb.WRITE, [None, 0], 0),
    (Verb.CLEAR, [b"m"], 0),
    (Verb.STATUS, [1], "payload"),
    (Verb.REAP, [None, None], 0),
    (Verb.REAP, [1, True], 1),
    (Verb.EVENTS, [0], "payload"),
    (Verb.EVENTS, [0, -1], 1),
]


@pytest.mark.parametrize(("verb", "payload", "position"), BAD, ids=lambda value: str(value)[:40])
def test_a_refusal_names_the_verb_and_the_position(verb: Verb, payload: list[object], position: int | str) -> None:
    frame = encode_request(verb, 1, payload) if payload != [2**64] else b""
    with pytest.raises(InvalidPayload) as caught:
        m.parse_request(verb, payload)
    assert (caught.value.verb, caught.value.position) == (verb.name, position)
    assert caught.value.expected
    assert caught.value.got
    assert len(str(caught.value)) < 300
    if frame:
        with pytest.raises(InvalidPayload):  # at the latest there: a string too long already in the codec
            m.parse_request(verb, decode_body(frame))


def test_a_payload_that_is_no_array_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="expects an array of 1 at payload, got dict of 0"):
        m.Ping.from_payload({})  # type: ignore[arg-type]


def test_a_registration_is_read_whole() -> None:
    message = m.Register.from_payload(changed(REGISTER, 10, to=[FD, CUDA]))
    assert message.groups == (m.Group(16, 8, (m.Plane(0, 0, 64, 64, (2, 4), (0, 1)),)),)
    assert message.handles == (m.FdHandle(0, 512), m.CudaHandle(b"h" * 64, "GPU-1", 512))


def test_a_registration_without_memory_is_read() -> None:
    message = m.Register.from_payload([SECRET, "m", "", 0, 1, "", "", "none", "", [], []])
    assert (message.mode, message.groups, message.handles) == ("none", (), ())


def test_a_role_is_a_role() -> None:
    hello = m.Hello.from_payload([1, 1, 2, "s", SECRET])
    assert hello.role is Role.SCHEDULER
    assert type(hello.to_payload()[2]) is int


@pytest.mark.parametrize(("payload", "instance_id"), [([5], 5), ([None], 0), ([2**64 - 1], 2**64 - 1)])
def test_a_ping_agrees_with_its_header(payload: list[object], instance_id: int) -> None:
    header = decode_header(encode_request(Verb.PING, 1, payload, instance_id=instance_id))
    assert m.check_ping(payload, header) == m.Ping(payload[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(("payload", "instance_id"), [([5], 6), ([None], 5), ([5], 0), ([0], 0), ([], 0), ([5, 5], 5)])
def test_a_ping_that_disagrees_with_its_header_is_refused(payload: list[object], instance_id: int) -> None:
    header = decode_header(encode_request(Verb.PING, 1, payload, instance_id=instance_id))
    with pytest.raises(InvalidPayload) as caught:
        m.check_ping(payload, header)
    assert caught.value.verb == "PING"
    assert isinstance(caught.value, ProtocolError)
