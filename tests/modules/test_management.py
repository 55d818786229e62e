from typing import Any

import msgpack
import pytest

from lmlive.errors import InternalError, InvalidPayload, ServerDraining, VersionError
from lmlive.modules.events import EventLog, spell
from lmlive.modules.handler import Lane
from lmlive.modules.management import admit_events, admit_hello, admit_reap, admit_status, answer_ping, hash_secret
from lmlive.protocol.codec import REPLY, VERSION, Header, decode_body, decode_header, encode_reply, encode_request
from lmlive.protocol.messages import Events, Hello, HelloReply, Reap, Status
from lmlive.protocol.verbs import Role, Verb
from tests.modules.registry import BARE, SECRET, Asked, Registry


def ask(registry: Registry, message: Hello | Reap | Events | Status) -> Asked:
    admits = {Hello: admit_hello, Reap: admit_reap, Events: admit_events, Status: admit_status}
    return Asked(registry, admits[type(message)], message, 0).start(registry.books)


def ping(instance_id: int, payload: list[object]) -> tuple[bytes, Header]:
    frame = encode_request(Verb.PING, 3, payload, instance_id=instance_id, epoch=5, generation=2)
    return frame, decode_header(frame)


def test_hello_states_terms_and_notes_who_speaks() -> None:
    registry = Registry()
    registry.books.tether_path = "/run/tether"
    asked = ask(registry, Hello(1, 3, Role.SCHEDULER, "engine 1.0", SECRET))
    assert isinstance(asked.answer, list)
    reply = HelloReply.from_payload(asked.answer)
    assert reply == HelloReply(
        version=1,
        chunk_tokens=256,
        beat=10.0,
        reap_timeout=120.0,
        limits={"message_bytes": 1 << 20, "tokens": 1 << 20, "blocks": 65_536, "in_flight": 64},
        tether_path="/run/tether",
        server_monotonic_ns=100_000_000_000,
    )
    said = registry.books.connections.find(b"peer")
    assert said is not None
    assert (said.role, said.secret_hash, said.software) == (2, hash_secret(SECRET), "engine 1.0")


def test_hello_without_a_common_version_is_told_both_ranges() -> None:
    registry = Registry()
    refused = ask(registry, Hello(2, 3, Role.WORKER, "", SECRET)).answer
    assert isinstance(refused, VersionError)
    assert (refused.server_min, refused.server_max, refused.peer_min, refused.peer_max) == (1, VERSION, 2, 3)
    assert registry.books.connections.find(b"peer") is None


def test_the_least_used_connection_must_say_hello_again() -> None:
    registry = Registry()
    connections = registry.books.connections
    connections._maximum = 2
    for peer in (b"a", b"b"):
        ask(registry, Hello(1, 1, Role.WORKER, "", SECRET))
        said = connections.find(b"peer")
        assert said is not None
        connections.say(peer, said)
    assert len(connections) == 2
    assert connections.find(b"peer") is not None
    assert connections.find(b"a") is None


@pytest.mark.parametrize("instance_id", [0, 1, 200, 70_000, 2**32, 2**62 + 5])
def test_a_ping_is_answered_true_whatever_the_width_of_its_id(instance_id: int) -> None:
    reply, refusal = answer_ping(*ping(instance_id, [instance_id or None]), 5, 9)
    assert refusal is None
    assert decode_header(reply) == (VERSION, REPLY, 0, 3, 5, instance_id, 9, 0)
    assert decode_body(reply) == [True]


@pytest.mark.parametrize("payload", [[], [1, 2], [None], ["1"], [True], [2], [-1], [2**63 + 3]])
def test_a_ping_with_another_body_is_refused(payload: list[object]) -> None:
    reply, refusal = answer_ping(*ping(1, payload), 5, 9)
    assert isinstance(refusal, InvalidPayload)
    assert decode_header(reply).code == InvalidPayload.code
    assert decode_header(reply).generation == 9


def test_a_wide_ping_that_names_another_instance_is_refused() -> None:
    frame, header = ping(2**62, [2**62 + 1])
    assert isinstance(answer_ping(frame, header, 5, 0)[1], InvalidPayload)


def test_a_ping_with_bytes_that_are_no_payload_is_refused() -> None:
    frame, header = ping(0, [None])
    for broken in (frame[:48], frame + b"\xc0", frame[:48] + b"\xc1", frame[:48] + msgpack.packb({})):
        assert isinstance(answer_ping(broken, header, 5, 0)[1], InvalidPayload)


def test_reap_removes_who_is_named_and_says_whether_it_did() -> None:
    registry = Registry()
    registry.register(**BARE)
    assert ask(registry, Reap(7, 2)).answer == [False]
    assert ask(registry, Reap(8, None)).answer == [False]
    assert ask(registry, Reap(7, 1)).answer == [True]
    assert ask(registry, Reap(7, 1)).answer == [False]
    assert registry.kinds() == ["registered", "reaped"]


def test_events_are_given_after_a_number() -> None:
    registry = Registry()
    registry.register(**BARE)
    [event] = ask(registry, Events(0, 10)).answer[0]  # type: ignore[index,misc]
    assert event["kind"] == "registered"
    assert event["seq"] == 1
    assert event["at"] == 100.0
    assert ask(registry, Events(1, 10)).answer == [[]]
    assert ask(registry, Events(0, 0)).answer == [[]]


@pytest.mark.parametrize(("size", "given"), [(1, 300), (5000, 13), (70_000, 1)])
def test_an_answer_holds_as_many_events_as_a_message_may_and_one_at_least(size: int, given: int) -> None:
    registry = Registry(max_message_bytes=65_536)
    for _ in range(300):
        registry.books.events.emit("tick", 0.0, model="m" * size)

    def seqs(after: int) -> list[int]:
        answer: Any = ask(registry, Events(after, 1000)).answer
        assert len(answer[0]) == 1 or len(encode_reply(1, 2, 3, 4, answer)) <= 65_536
        return [event["seq"] for event in answer[0]]

    assert seqs(0) == list(range(1, given + 1))
    assert seqs(given)[:1] == ([given + 1] if given < 300 else [])


def test_events_that_are_gone_are_named() -> None:
    events = EventLog(kept=3)
    for number in range(5):
        events.emit("tick", float(number))
    assert events.first_seq == 3
    assert [event["seq"] for event in events.after(2, 10)] == [3, 4, 5]
    assert [event["seq"] for event in events.after(3, 1)] == [4]
    assert events.after(5, 10) == []
    assert events.after(99, 10) == []
    assert events.after(2**64 - 1, 10) == []
    lost, *kept = events.after(0, 2)
    assert lost == {"seq": 2, "kind": "lost", "at": 2.0, "count": 2, "first_seq": 3}
    assert [event["seq"] for event in kept] == [3, 4]


def test_facts_read_as_words() -> None:
    assert spell({"a": 1, "b": None, "c": "two words", "d": "", "e": 'x"y'}) == "a=1 c='two words' d='' e='x\"y'"


def test_status_is_the_servers_own() -> None:
    asked = ask(Registry(), Status())
    assert asked.answer is None
    assert asked.work is not None
    assert asked.work.lane is Lane.NORMAL
    assert isinstance(asked.work.run(), bytes)
    assert asked.run().answer == [{"server": {"state": "serving"}}]


def test_a_status_that_no_lane_packs_is_an_error() -> None:
    asked = ask(Registry(), Status())
    assert asked.work is not None
    asked.work.settle(None, ServerDraining("closing"))
    assert isinstance(asked.answer, ServerDraining)


@pytest.mark.parametrize("text", ["a\x1b[31mRED", "b\nreaped", "c\x7f", "d\u202e", "e\ud800", "\u2028"])
def test_what_would_not_be_seen_is_spelt_out(text: str) -> None:
    assert spell({"model": text}).isprintable()
    event = EventLog().emit("registered", 1.0, model=text)
    assert str(event["model"]).isprintable()
    assert event["model"] != text


def test_a_handler_with_anothers_message_is_our_mistake() -> None:
    registry = Registry()
    asked = Asked(registry, admit_reap, Status(), 0).start(registry.books)
    assert isinstance(asked.answer, InternalError)
