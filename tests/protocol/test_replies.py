from typing import Any

import pytest
from hypothesis import given

from lmlive.errors import InvalidPayload
from lmlive.protocol import replies as r
from lmlive.protocol.codec import decode_body, encode_reply
from lmlive.protocol.verbs import Verb
from tests.protocol import strategies

READ_BY = {
    r.HelloReply: Verb.HELLO,
    r.RegisterReply: Verb.REGISTER,
    r.StoreReply: Verb.STORE,
    r.RetrieveReply: Verb.RETRIEVE,
    r.LookupReply: Verb.LOOKUP,
    r.PreparedReply: Verb.PREPARE_RETRIEVE,
}
SHARED = {Verb.PREPARE_STORE: "PREPARE", Verb.PREPARE_RETRIEVE: "PREPARE", Verb.COMMIT_STORE: "STORE"}
HELLO: list[object] = [1, 256, 10.0, 120, dict.fromkeys(r.LIMIT_NAMES, 1), None, 5]


@given(reply=strategies.structured_replies)
def test_every_reply_comes_back_as_it_was_sent(reply: Any) -> None:
    frame = encode_reply(1, 2, 3, 4, reply.to_payload())
    assert r.parse_reply(READ_BY[type(reply)], decode_body(frame)) == reply


@given(payload=strategies.payloads)
def test_any_payload_is_a_reply_or_an_invalid_payload(payload: list[object]) -> None:
    for verb in Verb:
        try:
            r.parse_reply(verb, payload)
        except InvalidPayload as error:
            assert error.verb == f"{SHARED.get(verb, verb.name)} reply"


@pytest.mark.parametrize(
    ("verb", "payload", "expected"),
    [
        (Verb.PING, [True], True),
        (Verb.UNREGISTER, [True], True),
        (Verb.RELEASE, [False], False),
        (Verb.REAP, [True], True),
        (Verb.CLEAR, [3], 3),
        (Verb.READ, [5], 5),
        (Verb.WRITE, [5], 5),
        (Verb.STATUS, [{"server": {}}], {"server": {}}),
        (Verb.EVENTS, [[{"seq": 1}]], [{"seq": 1}]),
    ],
)
def test_a_single_value_is_checked_and_given(verb: Verb, payload: list[object], expected: object) -> None:
    assert r.parse_reply(verb, payload) == expected


@pytest.mark.parametrize(
    ("verb", "payload"),
    [
        (Verb.PING, [False]),
        (Verb.PING, [1]),
        (Verb.PING, []),
        (Verb.UNREGISTER, [False]),
        (Verb.RELEASE, [None]),
        (Verb.REAP, [0]),
        (Verb.CLEAR, [-1]),
        (Verb.CLEAR, [True]),
        (Verb.STATUS, [[]]),
        (Verb.STATUS, [{b"server": 1}]),
        (Verb.EVENTS, [{}]),
        (Verb.STORE, [256, 1, None]),
        (Verb.RETRIEVE, [-1, "miss"]),
        (Verb.LOOKUP, [0, None, float("inf"), "miss"]),
        (Verb.LOOKUP, [0, None, float("nan"), "miss"]),
        (Verb.LOOKUP, [0, None, -1.0, "miss"]),
        (Verb.LOOKUP, [0, None, True, "miss"]),
        (Verb.PREPARE_STORE, [None, [64, bytes(3), b""], 0, "present"]),
        (Verb.PREPARE_STORE, [None, [64, bytes(8), bytes(8)], 0, "present"]),
        (Verb.PREPARE_RETRIEVE, [1, [64, b"", b""], 0, "miss"]),
        (Verb.READ, [-1]),
        (Verb.WRITE, []),
        (Verb.REGISTER, [10.0, b"short"]),
        (Verb.HELLO, [*HELLO[:4], {"tokens": 1}, *HELLO[5:]]),
        (Verb.HELLO, [*HELLO[:4], {**dict.fromkeys(r.LIMIT_NAMES, 1), "tokens": True}, *HELLO[5:]]),
    ],
)
def test_a_reply_that_breaks_its_promise_is_refused(verb: Verb, payload: list[object]) -> None:
    with pytest.raises(InvalidPayload):
        r.parse_reply(verb, payload)


def test_whole_seconds_may_come_as_integers_and_unknown_limits_are_left_out() -> None:
    limits = {**dict.fromkeys(r.LIMIT_NAMES, 1), "new": "thing"}
    reply = r.HelloReply.from_payload([*HELLO[:4], limits, *HELLO[5:]])
    assert type(reply.reap_timeout) is float
    assert tuple(reply.limits) == r.LIMIT_NAMES
