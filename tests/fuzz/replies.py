"""Replies of every kind that a server without manners could give."""

import random
import struct
from typing import Final

from lmlive.errors import BY_CODE
from lmlive.protocol.codec import HEADER_BYTES, HEADER_FORMAT, encode_reply
from lmlive.protocol.verbs import Verb
from tests.fuzz.messages import U64, Facts, hostile_msgpack
from tests.fuzz.values import anything, spoil

LIMITS: Final = {"message_bytes": 1 << 20, "tokens": 1 << 20, "blocks": 65_536, "in_flight": 64}
_HEADER: Final = struct.Struct(HEADER_FORMAT)


def result_of(rng: random.Random, verb: Verb) -> list[object]:  # noqa: PLR0911 - one for each verb
    """Give what a verb results in, as a rule."""
    tokens = rng.choice([0, 64, 128, 2**40])
    match verb:
        case Verb.HELLO:
            limits: dict[str, object] = dict(LIMITS)
            if rng.random() < 0.3:
                limits[rng.choice([*LIMITS])] = rng.choice([0, 1, -1, U64, None, "x"])
            path = rng.choice([None, None, "", "/nowhere/x.tether", "x" * 200, "\0"])
            version = rng.choice([1] * 12 + [0, 2, 255])
            return [version, 64, rng.choice([10.0, 0.0, 1e300]), 120.0, limits, path, rng.choice([0, 1, 2**63 - 1])]
        case Verb.REGISTER:
            return [10.0, rng.choice([b"", bytes(32)])]
        case Verb.STORE | Verb.COMMIT_STORE:
            return [tokens, rng.choice([0, 1, 2, 2**40]), rng.choice(["stored", "present", "no_space", "x"])]
        case Verb.RETRIEVE:
            return [tokens, rng.choice(["loaded", "miss", "partial", "x"])]
        case Verb.LOOKUP:
            return [tokens, rng.choice([None, "lease"]), 60.0, rng.choice(["hit", "miss", "x"])]
        case Verb.PREPARE_STORE | Verb.PREPARE_RETRIEVE:
            slots = [rng.choice([0, 64, 2**40]), bytes(4), rng.choice([b"", bytes(8), b"\xff" * 8])]
            return [rng.choice([None, "lease"]), slots, tokens, rng.choice(["prepared", "loaded", "miss", "x"])]
        case Verb.READ | Verb.WRITE:
            return [rng.choice([0, 64, 2**40])]
        case Verb.STATUS:
            return [{"server": {"pid": 1}}]
        case _:
            return [rng.choice([True, True, False])]


def make_reply(rng: random.Random, verb: Verb, number: int, facts: Facts) -> bytes:  # noqa: PLR0911 - one for each kind
    """Give the frame of a reply: right, wrong, broken or hostile."""
    senders = (number, facts.epoch, facts.instance_id, facts.generation)
    kind = rng.random()
    if kind < 0.35:
        return encode_reply(*senders, result_of(rng, verb))
    if kind < 0.5:
        return encode_reply(*senders, spoil(rng, result_of(rng, verb)))
    if kind < 0.65:
        code = rng.choice([*BY_CODE, 3, 999, 65_535])
        bodies: list[list[object]] = [
            ["no", {}],
            ["no", {"retry_after": anything(rng)}],
            ["no"],
            [1, {}],
            ["x" * 9000, {}],
            [],
        ]
        body = rng.choice(bodies)
        return encode_reply(*senders, body, code=code)
    frame = encode_reply(*senders, result_of(rng, verb))
    if kind < 0.75:
        return frame[:HEADER_BYTES] + hostile_msgpack(rng)
    if kind < 0.8:
        return frame[: rng.randrange(len(frame))]
    if kind < 0.9:
        fields = list(_HEADER.unpack(frame[:HEADER_BYTES]))
        at = rng.randrange(1, 8)
        fields[at] = (
            rng.choice([0, 1, 2, 255]) if at < 3 else rng.choice([0, 1, 22, 65_535]) if at == 3 else rng.getrandbits(64)
        )
        return _HEADER.pack(*fields) + frame[HEADER_BYTES:]
    broken = bytearray(frame)
    for _ in range(rng.choice([1, 2, 8])):
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)
