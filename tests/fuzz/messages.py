"""Messages of every kind that somebody could send: right ones, broken ones, hostile ones.

A message depends on the seed, its number and what is true of its sender (``Facts``), and on nothing else: with the seed
and the number it is made again.
"""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgpack

from lmlive.protocol.codec import HEADER_BYTES, HEADER_FORMAT, MAGIC, encode_reply, encode_request
from lmlive.protocol.verbs import Verb
from tests.end_to_end.peer import keys_of, packed, register
from tests.end_to_end.scene import prompt
from tests.fuzz.subject import CHUNK, MODEL
from tests.fuzz.values import anything, spoil

Message = list[bytes]
U64: Final = 2**64 - 1
MOST_BYTES: Final = 30_000
"""Longer than a server of the fuzz takes, and shorter than what libzmq ends a connection for."""
PROMPTS: Final = [keys_of(prompt(2 * CHUNK, seed)) for seed in range(4)]
_HEADER: Final = struct.Struct(HEADER_FORMAT)
_OFTEN: Final = [Verb.STORE, Verb.RETRIEVE, Verb.LOOKUP, Verb.REGISTER]
_VERBS: Final = [*Verb, *Verb, *_OFTEN, *_OFTEN, *_OFTEN]


@dataclass(slots=True)
class Facts:
    """What is true of a sender.

    Args:
        epoch: Of its server.
        secret: Its own.
        instance_id: Its own.
        generation: The live one, as far as it was told; 0 for none.
        lease: One that it was given.
    """

    epoch: int
    secret: bytes
    instance_id: int
    generation: int = 0
    lease: str = "nothing"
    others: list[int] = field(default_factory=list)


def make(seed: int, number: int, facts: Facts) -> Message:
    """Give one message."""
    rng = random.Random(f"{seed}/{number}")  # noqa: S311 - a seed that repeats, no secret
    [maker] = rng.choices(_MAKERS, _WEIGHTS)
    message = maker(rng, number, facts)
    return [frame[:MOST_BYTES] for frame in message]


def payload_of(rng: random.Random, verb: Verb, facts: Facts) -> list[object]:  # noqa: PLR0911 - one for each verb
    """Give a payload that a verb takes."""
    keys, lease = rng.choice(PROMPTS), rng.choice([None, facts.lease])
    start = rng.randrange(9)
    blocks: list[object] = [packed(range(start, start + 8))]
    skip = rng.choice([0, 0, 16, CHUNK])
    match verb:
        case Verb.HELLO:
            return [1, rng.choice([1, 1, 2, 255]), rng.choice([1, 2, 3]), "fuzz", facts.secret]
        case Verb.PING:
            return [facts.instance_id]
        case Verb.REGISTER:
            if rng.random() < 0.5:
                return [facts.secret, MODEL, "", 0, 1, "", "", "none", "auto", [], []]
            return register(facts.secret, model=MODEL)
        case Verb.UNREGISTER:
            return [facts.secret if rng.random() < 0.1 else rng.randbytes(16)]
        case Verb.STORE:
            return [keys, blocks, skip, bytes(16)]
        case Verb.RETRIEVE:
            return [keys, blocks, skip, lease]
        case Verb.LOOKUP:
            return [MODEL, "", rng.choice([1, 1, 1, 2, 4096]), keys, lease]
        case Verb.RELEASE:
            return [facts.lease]
        case Verb.PREPARE_STORE:
            return [keys, skip, bytes(16)]
        case Verb.PREPARE_RETRIEVE:
            return [keys, skip, lease]
        case Verb.COMMIT_STORE:
            return [facts.lease, rng.choice([None, bytes(8), bytes(16)])]
        case Verb.READ:
            return [facts.lease, rng.choice([0, 8, U64 // 2]), rng.choice([1, 1 << 20])]
        case Verb.WRITE:
            return [facts.lease, rng.choice([0, 8, U64 // 2])]
        case Verb.CLEAR:
            return [MODEL]
        case Verb.STATUS:
            return []
        case Verb.REAP:
            return [facts.instance_id, rng.choice([None, 0, facts.generation, 99])]
        case Verb.EVENTS:
            return [rng.choice([0, 10, U64]), rng.choice([0, 1, 1000, U64])]


def header_of(rng: random.Random, facts: Facts) -> dict[str, int]:
    """Give the header of a request that is let in."""
    deadline = rng.choice([0] * 8 + [1, 2**63 - 1])
    return {
        "epoch": facts.epoch,
        "instance_id": facts.instance_id,
        "generation": facts.generation,
        "deadline_ns": deadline,
    }


def right(rng: random.Random, number: int, facts: Facts) -> Message:
    """Give a request that nothing is wrong with."""
    verb = rng.choice(_VERBS)
    return [encode_request(verb, number, payload_of(rng, verb, facts), **header_of(rng, facts))]


def spoilt(rng: random.Random, number: int, facts: Facts) -> Message:
    """Put something else into a payload."""
    verb = rng.choice(_VERBS)
    payload = spoil(rng, payload_of(rng, verb, facts))
    if rng.random() < 0.2:
        payload = payload[: rng.randrange(len(payload) + 1)] + [anything(rng) for _ in range(rng.randrange(3))]
    return [encode_request(verb, number, payload, **header_of(rng, facts))]


def flipped(rng: random.Random, number: int, facts: Facts) -> Message:
    """Turn some bits over."""
    frame = bytearray(right(rng, number, facts)[0])
    for _ in range(rng.choice([1, 1, 2, 8])):
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return [bytes(frame)]


def cut(rng: random.Random, number: int, facts: Facts) -> Message:
    """Leave out the end."""
    [frame] = right(rng, number, facts)
    return [frame[: rng.randrange(len(frame))]]


def extended(rng: random.Random, number: int, facts: Facts) -> Message:
    """Add something at the end, or in the middle."""
    [frame] = right(rng, number, facts)
    at = rng.choice([len(frame), rng.randrange(HEADER_BYTES, len(frame) + 1)])
    more = rng.choice([b"\0", b"\xc0", frame, rng.randbytes(rng.randrange(1, 40)), b"\xc0" * 5000])
    return [frame[:at] + more + frame[at:]]


def spliced(rng: random.Random, number: int, facts: Facts) -> Message:
    """Put the head of one request before the tail of another."""
    [one], [other] = right(rng, number, facts), right(rng, number, facts)
    return [one[: rng.randrange(len(one))] + other[rng.randrange(len(other)) :]]


def hostile(rng: random.Random, number: int, facts: Facts) -> Message:
    """Put msgpack that wants to hurt behind a header, alone or in a payload's place."""
    verb = rng.choice(_VERBS)
    header = encode_request(verb, number, [], **header_of(rng, facts))[:HEADER_BYTES]
    body = hostile_msgpack(rng)
    if rng.random() < 0.5:
        payload = payload_of(rng, verb, facts)
        at = rng.randrange(len(payload) + 1)
        before, after = payload[:at], payload[at + 1 :]
        count = bytes([0x90 + len(before) + 1 + len(after)])
        body = count + b"".join(map(msgpack.packb, before)) + body + b"".join(map(msgpack.packb, after))
    return [header + body]


def hostile_msgpack(rng: random.Random) -> bytes:
    """Give a value that is deep, endless, foreign or no value."""
    depth = rng.choice([10, 511, 513, 1025, 20_000])
    huge = rng.choice([b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9"]) + rng.choice(
        [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x10\x00\x00"]
    )
    extension = rng.choice(
        [b"\xd4\x05\x00", b"\xd6\xff\0\0\0\0", b"\xd7\xff" + bytes(8), b"\xc7\x00\xff", b"\xc7\x0c\xff" + b"\xff" * 12]
    )
    return rng.choice(
        [
            b"\x91" * depth,
            b"\x91" * depth + b"\xc0",
            b"\xdc\x10\x00" * (depth // 3),
            b"\x81\xa1a" * (depth // 3),
            huge,
            huge + rng.randbytes(20),
            extension,
            b"\x92\xcb\x7f\xf8" + bytes(6) + b"\xca\x7f\x80\x00\x00",  # NaN and infinity
            b"\x82\xa1a\x01\xa1a\x02",  # a key twice
            b"\x81\x91\x01\x02",  # a key that cannot be one
            b"\x81\xc4\x01a\x02",
            b"\xa2\xff\xfe",  # not UTF-8
            b"\xa3\xed\xa0\x80",  # half a surrogate pair
            b"\xcf" + b"\xff" * 8,
            b"\xd3\x80" + bytes(7),
            b"\xcb\x7f\xef" + b"\xff" * 6,
            b"\xc1",
            b"\xda\x10\x01" + b"a" * 4097,
            b"\xdc\x10\x01" + b"\xc0" * 4097,
            b"",
        ]
    )


def random_body(rng: random.Random, number: int, facts: Facts) -> Message:
    """Put random bytes behind a header."""
    [frame] = right(rng, number, facts)
    return [frame[:HEADER_BYTES] + rng.randbytes(rng.choice([0, 1, 3, 20, 300]))]


def random_bytes(rng: random.Random, _: int, __: Facts) -> Message:
    """Give bytes of no protocol."""
    return [
        rng.choice([b"", b"LML", MAGIC, b"GET / HTTP/1.1\r\n\r\n"]) + rng.randbytes(rng.choice([0, 1, 44, 48, 200]))
    ]


def wild_header(rng: random.Random, number: int, facts: Facts) -> Message:
    """Say something unlikely in a header's fields."""
    [frame] = right(rng, number, facts)
    fields = list(_HEADER.unpack(frame[:HEADER_BYTES]))
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(1, len(fields))
        if at < 3:
            fields[at] = rng.choice([0, 1, 2, 7, 255])
        elif at == 3:
            fields[at] = rng.choice([0, 9, 16, 20, 99, 65_535, *map(int, Verb)])
        elif at == 8:
            fields[at] = rng.choice([-(2**63), -1, 0, 1, 2**63 - 1])
        else:
            fields[at] = rng.choice([0, 1, facts.instance_id, facts.generation, 2**63, U64, rng.getrandbits(64)])
    return [_HEADER.pack(*fields) + frame[HEADER_BYTES:]]


def many_frames(rng: random.Random, number: int, facts: Facts) -> Message:
    """Give a message of more frames than one, whichever of them says something."""
    [frame] = right(rng, number, facts)
    more = [rng.choice([b"", b"x", frame, rng.randbytes(100)]) for _ in range(rng.choice([1, 2, 63, 64, 65, 200]))]
    return [frame, *more] if rng.random() < 0.7 else [more[0], frame, *more[1:]]


def large(rng: random.Random, number: int, facts: Facts) -> Message:
    """Give more bytes than a message may have."""
    verb = rng.choice([Verb.STORE, Verb.RETRIEVE, Verb.PING, Verb.REGISTER])
    body = bytes(rng.randrange(16_000, MOST_BYTES))
    return [encode_request(verb, number, [body], **header_of(rng, facts))]


def reply(rng: random.Random, number: int, facts: Facts) -> Message:
    """Give a reply, which nobody sends to a server."""
    return [encode_reply(number, facts.epoch, facts.instance_id, facts.generation, [True], code=rng.choice([0, 22]))]


Maker = Callable[[random.Random, int, Facts], Message]

_SHARES: Final[dict[Maker, int]] = {
    right: 20,
    spoilt: 20,
    flipped: 14,
    hostile: 10,
    wild_header: 8,
    cut: 6,
    extended: 5,
    spliced: 5,
    random_body: 4,
    random_bytes: 3,
    many_frames: 2,
    reply: 2,
    large: 1,
}
_MAKERS: Final = [*_SHARES]
_WEIGHTS: Final = [*_SHARES.values()]


def is_request(message: Message) -> bool:
    """Tell whether a message has a legible header of a request, and so gets one reply."""
    first = message[0]
    return len(first) >= HEADER_BYTES and first[:4] == MAGIC and first[5] == 0


def request_id(message: Message) -> int:
    """Give the number by which its reply names a request."""
    return int.from_bytes(message[0][8:16], "little")
