"""The codec alone, at full speed: whatever the bytes, a value or a typed error; and what was read reads again."""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgpack

from lmlive.errors import LMLiveError, ProtocolError
from lmlive.protocol.codec import HEADER_BYTES, decode_body, decode_header, encode_request
from lmlive.protocol.messages import parse_error, parse_reply, parse_request
from lmlive.protocol.tether import Greeting, Offer, decode_answer
from lmlive.protocol.verbs import Verb
from lmlive.worker.reply import read_reply
from tests.fuzz.messages import Facts, make
from tests.fuzz.replies import make_reply

SLOW_SECONDS: Final = 1.0
"""No frame of a few KiB takes so long, on however busy a machine."""


def read_request(frame: bytes) -> str:
    """Do what a server does with a frame, and compare what it read with what that encodes to."""
    header = decode_header(frame)
    message = parse_request(header.code, decode_body(frame))
    again = encode_request(header.code, header.request_id, message.to_payload())
    assert parse_request(header.code, decode_body(again)) == message
    return type(message).__name__


def read_any_reply(frame: bytes, verb: Verb) -> str:
    """Do what a worker does with a frame."""
    header = decode_header(frame)
    reply = read_reply(header, frame)
    assert reply.error is None or isinstance(reply.error, LMLiveError)
    if header.code:
        parse_error(header.code, decode_body(frame))
    value = parse_reply(verb, reply.result())
    return type(value).__name__


def read_packet(packet: bytes) -> str:
    """Do what both sides of a tether do with a packet."""
    for reader in (Greeting.decode, Offer.decode):
        try:
            reader(packet)
        except ProtocolError:
            continue
    return type(decode_answer(packet)).__name__


def parse_many(seed: int, count: int) -> dict[str, Any]:
    """Read so many frames; give how they ended, or the first that did not end as it must."""
    ended: Counter[str] = Counter()
    facts = Facts(9, b"s" * 16, 7, 3)
    began = time.monotonic()
    for number in range(count):
        rng = random.Random(f"{seed}/parse/{number}")  # noqa: S311 - a seed that repeats, no secret
        frame = make(seed, number, facts)[0]
        verb = rng.choice([*Verb])
        tried: list[tuple[Callable[[], str], bytes]] = [(lambda frame=frame: read_request(frame), frame)]  # type: ignore[misc]
        if number % 2:
            answer = make_reply(rng, verb, number, facts)
            tried.append((lambda answer=answer, verb=verb: read_any_reply(answer, verb), answer))  # type: ignore[misc]
        if number % 4 == 0:
            packet = frame[HEADER_BYTES:] or msgpack.packb([number])
            tried.append((lambda packet=packet: read_packet(packet), packet))  # type: ignore[misc]
        for read, tried_bytes in tried:
            start = time.monotonic()
            try:
                ended[read()] += 1
            except LMLiveError as error:
                ended[type(error).__name__] += 1
            except Exception as error:  # noqa: BLE001 - that is the finding
                return {"finding": repr(error), "seed": seed, "number": number, "frame": tried_bytes.hex()[:4000]}
            if time.monotonic() - start > SLOW_SECONDS:
                return {"finding": "slow", "seed": seed, "number": number, "frame": tried_bytes.hex()[:4000]}
    seconds = time.monotonic() - began
    return {"frames": count, "per_second": round(count / seconds), "ended": dict(ended.most_common())}
