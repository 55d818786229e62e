from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from lmlive.clock import MonotonicClock
from lmlive.errors import VersionError
from lmlive.protocol.messages import Hello, HelloReply
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.hello import SLACK_NS, ServerFacts, measure, say_hello
from lmlive.worker.link import Link
from tests.worker.fake_server import LIMITS, FakeServer, Request

CLOCK = MonotonicClock()


def told(server_ns: int) -> HelloReply:
    return HelloReply(1, 256, 10.0, 120.0, LIMITS, None, server_ns)


@given(
    offset=st.integers(-(2**40), 2**40),
    out=st.integers(0, 2**33),
    back=st.integers(0, 2**33),
    deadline=st.integers(0, 2**50),
)
def test_the_server_never_believes_that_it_has_more_time(offset: int, out: int, back: int, deadline: int) -> None:
    sent = 2**51
    facts = measure(7, told(sent + out + offset), sent, sent + out + back)
    assert abs(facts.offset_ns - offset) <= (out + back) // 2 + 1
    due = sent + deadline
    assert facts.deadline_ns(due / 1e9) <= due + offset + 1024  # a float of seconds has that much grain here


def test_one_clock_looks_like_one_however_slow_the_round_trip() -> None:
    for out, back in [(0, 10**9), (10**9, 0), (1000, 1000)]:
        assert measure(7, told(5 + out), 5, 5 + out + back).same_clock


def test_another_clock_does_not() -> None:
    assert not measure(7, told(10**12), 0, 10**6).same_clock
    assert not measure(7, told(SLACK_NS + 2000), 0, 1000).same_clock


def test_a_deadline_is_never_none_for_the_wire() -> None:
    assert ServerFacts(7, 256, 0.0, LIMITS, None, -(10**18), 0).deadline_ns(1.0) == 1


def test_a_deadline_beyond_all_time_still_travels() -> None:
    assert ServerFacts(7, 256, 0.0, LIMITS, None, 0, 0).deadline_ns(1e300) == 10**18


@pytest.mark.parametrize("offset", [2**63 - 1, -(2**63)])
def test_whatever_clock_a_server_claims_to_have_a_deadline_fits_the_wire(offset: int) -> None:
    facts = ServerFacts(7, 256, 0.0, LIMITS, None, offset, 0)
    for deadline in (0.0, 1e300):
        assert 0 < facts.deadline_ns(deadline) < 2**63


async def test_a_slow_first_round_trip_is_measured_again(run_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, f"ipc://{run_dir}/router.sock", connect_timeout=1.0)
    link.open()
    server = FakeServer(run_dir)
    try:
        server.start()
        facts = await say_hello(link, CLOCK, role=Role.WORKER, secret=bytes(16), deadline=CLOCK.now() + 5.0)
        assert facts.epoch == 7
        assert facts.chunk_tokens == 64
        assert facts.same_clock
        assert Hello.from_payload(server.seen(Verb.HELLO)[0].payload).role is Role.WORKER
    finally:
        link.close()
        server.stop()
        context.term()


async def test_a_refusal_is_raised_with_its_type(run_dir: Path) -> None:
    def refuse(request: Request) -> VersionError:
        return VersionError("upgrade", server_min=2)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, f"ipc://{run_dir}/router.sock", connect_timeout=1.0)
    link.open()
    with FakeServer(run_dir) as server:
        server.answers[Verb.HELLO] = refuse
        with pytest.raises(VersionError) as caught:
            await say_hello(link, CLOCK, role=Role.WORKER, secret=bytes(16), deadline=CLOCK.now() + 5.0)
        assert caught.value.server_min == 2
        link.close()
    context.term()
