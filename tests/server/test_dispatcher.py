from collections.abc import Callable
from functools import partial

import pytest

from lmlive.errors import (
    InternalError,
    InvalidPayload,
    LMLiveError,
    MessageTooLarge,
    NotOwner,
    RequestTimeout,
    ServerBusy,
    ServerDraining,
    ServerStarting,
    StaleEpoch,
    StaleGeneration,
    UnknownInstance,
    UnknownVerb,
    VersionError,
)
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.handler import Lane, Work
from lmlive.protocol.codec import HEADER_BYTES, decode_body, decode_header, encode_reply, encode_request
from lmlive.protocol.messages import Store
from lmlive.protocol.verbs import Verb
from tests.modules.registry import BARE, OTHER, SECRET
from tests.server.house import EPOCH, House
from tests.server.raw import bare

STORE: list[object] = [b"k" * 32, [b"\0" * 4], 0, bytes(16)]


async def test_what_is_illegible_is_counted_and_never_answered() -> None:
    house = House()
    request = encode_request(Verb.STATUS, 1, [])
    for frames in ([], [b""], [b"GET / HTTP/1.1\r\n"], [b"LML2" + request[4:]], [request[: HEADER_BYTES - 1]]):
        house.send(*frames)
    house.send(encode_reply(1, EPOCH, 0, 0, []))
    house.send(request[:5] + b"\x07" + request[6:])
    assert house.replies() == []
    assert house.dispatcher.bad_frames == 7
    assert house.dispatcher.outstanding == 0


async def test_a_ping_is_answered_by_the_normal_lane_with_one_hand_off_for_all() -> None:
    house = House()
    for number in range(5):
        house.ask(Verb.PING, [None], peer=b"%d" % number)
    assert house.lanes.works == []
    house.dispatcher.end_batch()
    [work] = house.lanes.works
    assert work.lane is Lane.NORMAL
    assert [body for _, body in house.replies()] == [[True]] * 5
    assert house.outbox.batches == 1


async def test_a_ping_without_an_id_where_an_instance_was_registered_is_answered_and_counted_as_odd() -> None:
    house = House()
    house.ask(Verb.PING, [None])
    house.ask(Verb.REGISTER, bare(), instance_id=7)
    house.replies()
    assert "OddPing" not in house.books.errors
    house.registry.pass_time(1.0)
    house.ask(Verb.PING, [None])
    house.ask(Verb.PING, [None], peer=b"a scheduler")
    assert [body for _, body in house.replies()] == [[True]] * 2
    assert house.books.errors["OddPing"] == 1
    assert house.silence() == 1.0
    live = house.books.roster.get(7)
    assert live is not None
    assert not live.proven


async def test_only_a_full_match_is_a_sign_of_life_and_the_reply_tells_the_generation() -> None:
    house = House()
    house.registry.register(**BARE)
    house.registry.pass_time(1.0)
    for epoch, generation in ((4, 1), (EPOCH, 2), (EPOCH, 0)):
        house.ask(Verb.PING, [7], instance_id=7, epoch=epoch, generation=generation)
        reply, body = house.reply()
        assert (reply.generation, reply.epoch, reply.instance_id, body) == (1, EPOCH, 7, [True])
        assert house.silence() == 1.0
    house.ask(Verb.PING, [7], instance_id=7, epoch=EPOCH, generation=1)
    assert house.silence() == 0.0
    live = house.books.roster.get(7)
    assert live is not None
    assert live.proven
    house.ask(Verb.PING, [8], instance_id=8, epoch=EPOCH, generation=1)
    assert [reply.generation for reply, _ in house.replies()] == [1, 0]


async def test_a_legible_header_with_a_bad_body_is_a_sign_of_life_and_gets_one_error() -> None:
    house = House()
    house.registry.register(**BARE)
    house.hello()
    house.registry.pass_time(1.0)
    house.ask(Verb.PING, [], instance_id=7, epoch=EPOCH, generation=1)
    assert house.silence() == 0.0
    assert isinstance(house.error(), InvalidPayload)
    house.registry.pass_time(1.0)
    house.ask(Verb.STORE, ["nonsense"], instance_id=7, epoch=EPOCH, generation=1)
    assert isinstance(house.error(), InvalidPayload)
    assert house.silence() == 0.0
    house.send(encode_request(Verb.STATUS, 1, [])[:HEADER_BYTES] + b"\xc1")
    assert isinstance(house.error(), InvalidPayload)
    assert house.books.errors["InvalidPayload"] == 3


async def test_traffic_touches_and_never_proves() -> None:
    house = House()
    house.registry.register(**BARE)
    house.hello()
    house.registry.pass_time(1.0)
    house.ask(Verb.STORE, STORE, instance_id=7, epoch=EPOCH, generation=1)
    live = house.books.roster.get(7)
    assert live is not None
    assert (house.silence(), live.proven) == (0.0, False)
    house.replies()


@pytest.mark.parametrize(("epoch", "generation"), [(4, 1), (0, 1), (EPOCH, 2), (EPOCH, 0)])
async def test_traffic_of_another_server_or_generation_touches_nothing(epoch: int, generation: int) -> None:
    house = House()
    house.registry.register(**BARE)
    house.hello()
    house.registry.pass_time(1.0)
    house.ask(Verb.STORE, STORE, instance_id=7, epoch=epoch, generation=generation)
    assert house.silence() == 1.0
    assert isinstance(house.error(), (StaleEpoch, StaleGeneration))


async def test_another_version_is_told_ours() -> None:
    house = House()
    house.registry.register(**BARE)
    for verb in (Verb.PING, Verb.HELLO, 99):
        frame = encode_request(verb, 11, [])
        house.send(frame[:4] + b"\x02" + frame[5:])
        refused = house.error()
        assert isinstance(refused, VersionError)
        assert (refused.server_max, refused.peer_min) == (1, 2)


async def test_an_unknown_verb_is_told_so() -> None:
    house = House()
    for verb in (0, 18, 20, 65_535):
        house.ask(verb, [])
        assert isinstance(house.error(), UnknownVerb)


async def test_a_message_over_the_limit_names_size_and_limit() -> None:
    house = House(max_message_bytes=4096)
    frame = encode_request(Verb.PING, 11, [None])
    house.send(frame + bytes(4096))
    refused = house.error()
    assert isinstance(refused, MessageTooLarge)
    assert (refused.limit, refused.size) == (4096, len(frame) + 4096)
    house.send(encode_request(Verb.STATUS, 11, []), bytes(4096))
    assert isinstance(house.error(), MessageTooLarge)


@pytest.mark.parametrize("trouble", ["too large", "frames", "draining", "deadline"])
async def test_whatever_becomes_of_a_request_its_sender_lives(trouble: str) -> None:
    house = House(max_message_bytes=4096)
    house.registry.register(**BARE)
    house.hello()
    house.registry.pass_time(1.0)
    if trouble == "draining":
        house.books.state = "draining"
    verb = Verb.STORE
    deadline_ns = -1 if trouble == "deadline" else 0
    frame = encode_request(verb, 1, STORE, instance_id=7, epoch=EPOCH, generation=1, deadline_ns=deadline_ns)
    house.send(*{"too large": [frame, bytes(4096)], "frames": [frame, b""]}.get(trouble, [frame]))
    assert house.silence() == 0.0
    assert isinstance(house.error(), LMLiveError)


async def test_a_deadline_before_the_beginning_of_time_is_refused() -> None:
    house = House()
    house.ask(Verb.CLEAR, [None], deadline_ns=-1)
    refused = house.error()
    assert isinstance(refused, InvalidPayload)
    assert refused.deadline_ns == -1
    house.ask(Verb.PING, [None], deadline_ns=-1)
    assert house.reply()[1] == [True]


async def test_over_tcp_nobody_reaps_or_clears() -> None:
    house = House()
    house.registry.register(**BARE)
    house.outbox.has_credential = False
    requests: list[tuple[Verb, list[object]]] = [(Verb.REAP, [7, None]), (Verb.CLEAR, [None])]
    for verb, payload in requests:
        house.ask(verb, payload)
        refused = house.error()
        assert isinstance(refused, NotOwner)
        assert "unix socket" in str(refused)
    assert house.books.roster.tracked == 1
    house.ask(Verb.EVENTS, [0, 1])
    assert house.reply()[0].code == 0
    house.outbox.has_credential = True
    house.ask(*requests[0])
    assert house.reply()[1] == [True]


async def test_frames_that_no_verb_takes_are_refused() -> None:
    house = House()
    for request in (encode_request(Verb.PING, 11, [None]), encode_request(Verb.STATUS, 11, [])):
        house.send(request, *[b""] * 64)
        refused = house.error()
        assert isinstance(refused, InvalidPayload)
        assert refused.got == 65


async def test_the_fence_in_its_order() -> None:
    house = House()
    house.registry.register(**BARE)

    def store(*, epoch: int, instance_id: int, generation: int) -> LMLiveError:
        house.ask(Verb.STORE, STORE, epoch=epoch, instance_id=instance_id, generation=generation)
        return house.error()

    refused = store(instance_id=7, epoch=EPOCH, generation=1)
    assert isinstance(refused, StaleEpoch)
    assert "hello" in refused.fields
    house.hello(OTHER)
    assert isinstance(store(instance_id=7, epoch=4, generation=9), NotOwner)
    assert isinstance(store(instance_id=8, epoch=4, generation=9), StaleEpoch)
    assert isinstance(store(instance_id=8, epoch=EPOCH, generation=9), UnknownInstance)
    assert isinstance(store(instance_id=0, epoch=EPOCH, generation=0), UnknownInstance)
    house.hello(SECRET)
    for generation in (0, 2):
        stale = store(instance_id=7, epoch=EPOCH, generation=generation)
        assert isinstance(stale, StaleGeneration)
        assert stale.fields["generation"] == 1
    assert not isinstance(
        store(instance_id=7, epoch=EPOCH, generation=1), (StaleEpoch, StaleGeneration, NotOwner, UnknownInstance)
    )


async def test_lookup_and_release_are_fenced_by_the_epoch_alone() -> None:
    house = House()
    lookup: list[object] = ["m", "", 1, b"k" * 32, None]
    for verb, payload in ((Verb.LOOKUP, lookup), (Verb.RELEASE, ["nothing"])):
        house.ask(verb, payload, epoch=EPOCH)
        assert isinstance(house.error(), StaleEpoch)
    house.hello()
    for verb, payload in ((Verb.LOOKUP, lookup), (Verb.RELEASE, ["nothing"])):
        house.ask(verb, payload, epoch=4)
        assert isinstance(house.error(), StaleEpoch)
        house.ask(verb, payload, epoch=EPOCH)
        assert house.reply()[0].code == 0


async def test_starting_and_draining_refuse_what_they_cannot_serve() -> None:
    house = House()
    house.books.state = "starting"
    house.ask(Verb.PING, [None])
    house.ask(Verb.HELLO, [1, 1, 1, "", SECRET])
    house.ask(Verb.STATUS, [])
    assert [header.code for header, _ in house.replies()] == [0, 0, 0]
    house.ask(Verb.EVENTS, [0, 1])
    assert isinstance(house.error(), ServerStarting)
    house.books.state = "draining"
    for verb in (Verb.STORE, Verb.RETRIEVE, Verb.LOOKUP, Verb.REGISTER):
        house.ask(verb, [])
        assert isinstance(house.error(), ServerDraining)
    house.ask(Verb.EVENTS, [0, 1])
    house.ask(Verb.UNREGISTER, [SECRET], instance_id=7)
    house.ask(Verb.PING, [None])
    assert sorted(header.code for header, _ in house.replies()) == [0, 0, 0]


async def test_a_request_past_its_deadline_is_not_executed() -> None:
    house = House()
    house.ask(Verb.CLEAR, [None], deadline_ns=house.registry.clock.now_ns() - 1)
    assert isinstance(house.error(), RequestTimeout)
    house.ask(Verb.CLEAR, [None], deadline_ns=house.registry.clock.now_ns())
    assert house.reply()[1] == [0]
    house.ask(Verb.PING, [None], deadline_ns=1)
    assert house.reply()[1] == [True]


def slow_store(books: Books, call: Call) -> Work:
    call.body(Store)
    return Work(Lane.TRANSFER, partial(len, "done"), lambda *_: call.reply([0, 0, "stored"]))


async def test_too_many_requests_in_flight_are_told_to_come_again() -> None:
    house = House({Verb.STORE: slow_store}, max_in_flight=2)
    house.registry.register(**BARE)
    house.hello()
    for _ in range(3):
        house.ask(Verb.STORE, STORE, instance_id=7, epoch=EPOCH, generation=1)
    assert house.dispatcher.outstanding == 2
    [(header, refused)] = [
        (decode_header(frame), decode_body(frame)) for _, frame in house.outbox.sent if decode_header(frame).code
    ]
    assert header.code == ServerBusy.code
    assert refused[1]["retry_after"] > 0  # type: ignore[index]
    assert len(house.replies()) == 3
    house.ask(Verb.STORE, STORE, instance_id=7, epoch=EPOCH, generation=1)
    assert house.reply()[0].code == 0
    assert house.dispatcher.outstanding == 0


def broken_admit(books: Books, call: Call) -> Work | None:
    raise RuntimeError("secret detail")


def forgetful_admit(books: Books, call: Call) -> Work | None:
    return None


def broken_work(books: Books, call: Call) -> Work:
    def settle(result: object | None, error: BaseException | None) -> None:
        assert error is not None
        call.fail(error)

    return Work(Lane.NORMAL, partial(int, "x"), settle)


def broken_settle(books: Books, call: Call) -> Work:
    def settle(result: object | None, error: BaseException | None) -> None:
        raise RuntimeError("secret detail")

    return Work(Lane.NORMAL, partial(len, ""), settle)


def forgetful_settle(books: Books, call: Call) -> Work:
    return Work(Lane.NORMAL, partial(len, ""), lambda *_: None)


def unsendable(books: Books, call: Call) -> Work | None:
    call.reply([object()])
    return None


@pytest.mark.parametrize(
    "admit", [broken_admit, forgetful_admit, broken_work, broken_settle, forgetful_settle, unsendable]
)
async def test_whatever_a_handler_does_its_request_is_answered_once(
    admit: Callable[[Books, Call], Work | None], caplog: pytest.LogCaptureFixture
) -> None:
    house = House({Verb.CLEAR: admit})
    house.ask(Verb.CLEAR, [None])
    refused = house.error()
    assert isinstance(refused, InternalError)
    assert "secret detail" not in str(refused)
    assert house.dispatcher.outstanding == 0
    assert house.books.errors["InternalError"] == 1
    if admit in (broken_admit, broken_work, unsendable):
        assert "Traceback" in caplog.text


async def test_lanes_that_break_still_settle() -> None:
    house = House({Verb.CLEAR: broken_work})
    house.lanes.broken = RuntimeError("no threads")
    house.ask(Verb.CLEAR, [None])
    house.lanes.broken = None
    assert isinstance(house.error(), InternalError)


async def test_pings_are_answered_although_their_lane_breaks() -> None:
    house = House()
    for error in (ServerDraining("closing"), RuntimeError("boom")):
        house.ask(Verb.PING, [None])
        house.dispatcher.end_batch()
        house.lanes.works.pop().settle(None, error)
        assert isinstance(house.error(), ServerDraining if isinstance(error, ServerDraining) else InternalError)


async def test_a_second_answer_is_counted_and_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[Call] = []

    def twice(books: Books, call: Call) -> Work | None:
        calls.append(call)
        call.reply([0])
        call.reply([1])
        return None

    house = House({Verb.CLEAR: twice})
    house.ask(Verb.CLEAR, [None])
    assert house.reply()[1] == [0]
    assert house.dispatcher.broken_rules == 1
    assert "answered twice" in caplog.text
    assert "answered" in repr(calls[0])


async def test_a_deferred_call_is_answered_later_or_at_the_end() -> None:
    calls: list[Call] = []

    def later(books: Books, call: Call) -> Work | None:
        calls.append(call)
        call.defer()
        return None

    house = House({Verb.CLEAR: later})
    for _ in range(3):
        house.ask(Verb.CLEAR, [None])
    assert house.replies() == []
    assert house.dispatcher.outstanding == 3
    calls[0].reply([1])
    assert house.reply()[1] == [1]
    house.dispatcher.readmit(calls[1])
    assert calls[1].deferred
    house.books.state = "draining"
    house.dispatcher.readmit(calls[1])
    assert isinstance(house.error(), ServerDraining)
    house.dispatcher.fail_deferred(lambda: ServerDraining("closed"))
    assert isinstance(house.error(), ServerDraining)
    await house.dispatcher.quiet()


async def test_replies_after_the_end_are_counted() -> None:
    house = House()
    house.dispatcher.answer_over(None)
    house.ask(Verb.CLEAR, [None])
    house.ask(Verb.PING, [None])
    assert house.replies() == []
    assert house.dispatcher.dropped_replies == 2


class Touched(InstanceLivenessTarget):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def touch_instance(self, instance_id: int) -> None:
        self.ids.append(instance_id)
        raise RuntimeError("not my day")


async def test_targets_are_touched_by_each_ping_that_names_an_instance() -> None:
    target = Touched()
    house = House(targets=[target])
    house.ask(Verb.PING, [9], instance_id=9)
    house.ask(Verb.PING, [None])
    assert [body for _, body in house.replies()] == [[True], [True]]
    assert target.ids == [9]


async def test_a_register_with_a_follower_goes_through_the_door() -> None:
    house = House()
    house.registry.tether()
    plane = ["fd", 0, 512]
    groups: list[object] = [[16, 8, [[0, 0, 64, 64, [16], [0]]]]]
    body: list[object] = [SECRET, "m", "", 0, 1, "int32", "", "server_driven", "auto", groups, [plane]]
    bare: list[object] = [SECRET, "m", "", 0, 1, "", "", "none", "auto", [], []]
    house.ask(Verb.REGISTER, body, instance_id=7)
    house.ask(Verb.REGISTER, bare, instance_id=7)
    assert house.dispatcher.outstanding == 2
    headers = [header for header, _ in house.replies()]
    assert [(header.code, header.generation) for header in headers] == [(0, 1), (0, 2)]
    assert house.registry.release_all() == 1


@pytest.mark.parametrize(
    ("verb", "sizes", "error"),
    [
        (Verb.WRITE, [4096, 4096], UnknownInstance),
        (Verb.WRITE, [1] * 63, UnknownInstance),
        (Verb.WRITE, [1] * 64, InvalidPayload),
        (Verb.WRITE, [4097], MessageTooLarge),
        (Verb.READ, [1], InvalidPayload),
        (Verb.STORE, [1], InvalidPayload),
    ],
)
async def test_one_verb_alone_brings_bytes_and_within_limits(
    verb: Verb, sizes: list[int], error: type[LMLiveError]
) -> None:
    house = House(max_message_bytes=4096)
    house.hello()
    frame = encode_request(verb, 1, ["lease", 0], epoch=EPOCH, instance_id=7, generation=1)
    house.send(frame, *(bytes(size) for size in sizes))
    assert isinstance(house.error(), error)


async def test_bytes_of_more_than_a_batch_are_refused() -> None:
    house = House(max_message_bytes=2 << 20)
    frame = encode_request(Verb.WRITE, 1, ["lease", 0], epoch=EPOCH, instance_id=7, generation=1)
    house.send(frame, *[bytes(2 << 20)] * 33)
    refused = house.error()
    assert isinstance(refused, MessageTooLarge)
    assert refused.limit == 64 << 20
