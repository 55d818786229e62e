"""What a reply holds: results with a structure as frozen objects, single values checked, errors as exceptions.

A worker trusts its server no further than the wire: whatever a reply holds, reading it gives what the verb promises
or ``InvalidPayload``.

Pure: any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from lmlive.errors import LMLiveError, UnknownVerb, from_wire
from lmlive.protocol.codec import MAX_REPLY_ITEMS
from lmlive.protocol.fields import I63_MAX, Fields
from lmlive.protocol.verbs import Verb

LAYOUT_KEY_BYTES: Final = 32
CHUNK_INDEX_BYTES: Final = 4
OFFSET_BYTES: Final = 8
LIMIT_NAMES: Final = ("message_bytes", "tokens", "blocks", "in_flight")


@dataclass(frozen=True, slots=True)
class HelloReply:
    """What a peer must know of the server before anything else.

    Args:
        version: The wire version both sides speak from here on.
        chunk_tokens: Tokens of one chunk.
        beat: Seconds between PINGs that the server advises.
        reap_timeout: Seconds of silence after which a proven instance is reaped; 0 for never.
        limits: "message_bytes", "tokens" and "blocks" of one request, "in_flight" of one instance.
        tether_path: Where the server's tether listens; None where it has none.
        server_monotonic_ns: The server's CLOCK_MONOTONIC when it answered.
    """

    version: int
    chunk_tokens: int
    beat: float
    reap_timeout: float
    limits: dict[str, int]
    tether_path: str | None
    server_monotonic_ns: int

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload; limits that this build does not know are left out."""
        fields = Fields("HELLO reply", payload, 7)
        limits = fields.mapping(4)
        named = Fields("HELLO reply", [limits.get(name) for name in LIMIT_NAMES], len(LIMIT_NAMES), (4,))
        return cls(
            version=fields.unsigned(0, most=255),
            chunk_tokens=fields.unsigned(1, least=1, most=I63_MAX),
            beat=fields.seconds(2),
            reap_timeout=fields.seconds(3),
            limits={name: named.unsigned(at) for at, name in enumerate(LIMIT_NAMES)},
            tether_path=fields.optional_text(5),
            server_monotonic_ns=fields.unsigned(6, most=I63_MAX),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [
            self.version,
            self.chunk_tokens,
            self.beat,
            self.reap_timeout,
            self.limits,
            self.tether_path,
            self.server_monotonic_ns,
        ]


@dataclass(frozen=True, slots=True)
class RegisterReply:
    """A registration's beat and layout; its generation is in the reply's header.

    Args:
        beat: Seconds between PINGs that the server advises.
        layout_key: What the server computed from the layout; empty where none was registered.
    """

    beat: float
    layout_key: bytes

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("REGISTER reply", payload, 2)
        return cls(beat=fields.seconds(0), layout_key=fields.binary(1, (0, LAYOUT_KEY_BYTES)))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.beat, self.layout_key]


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The prefix now held in tokens, the chunks newly published, and why it ended there."""

    tokens: int
    chunks: int
    reason: str

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("STORE reply", payload, 3)
        return cls(
            tokens=fields.unsigned(0, most=I63_MAX), chunks=fields.unsigned(1, most=I63_MAX), reason=fields.text(2)
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.tokens, self.chunks, self.reason]


@dataclass(frozen=True, slots=True)
class RetrieveReply:
    """The prefix loaded in tokens, and why it ended there."""

    tokens: int
    reason: str

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("RETRIEVE reply", payload, 2)
        return cls(tokens=fields.unsigned(0, most=I63_MAX), reason=fields.text(1))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.tokens, self.reason]


@dataclass(frozen=True, slots=True)
class PreparedReply:
    """Slots to copy to or from, and the lease that keeps them; without a lease, how the store or retrieve ended.

    Args:
        lease: Keeps the slots; None where there are none.
        chunk_bytes: Length of each slot.
        chunks: Which chunks of the prompt, a uint32 each, little-endian.
        offsets: Where the slots begin in the pool, a uint64 each, little-endian; empty where it is not shared.
        tokens: The prefix that is held (PREPARE_STORE), or that these slots bring the worker up to (PREPARE_RETRIEVE).
        reason: Why it ends there; "prepared" for a store that goes on.
    """

    lease: str | None
    chunk_bytes: int
    chunks: bytes
    offsets: bytes
    tokens: int
    reason: str

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("PREPARE reply", payload, 4)
        slots = fields.nested(1, 3)
        chunks, offsets = slots.packed(1, CHUNK_INDEX_BYTES), slots.packed(2, OFFSET_BYTES)
        if offsets and len(offsets) != len(chunks) // CHUNK_INDEX_BYTES * OFFSET_BYTES:
            slots.refuse(2, "an offset for each chunk, or none")
        return cls(
            lease=fields.optional_text(0),
            chunk_bytes=slots.unsigned(0, most=I63_MAX),
            chunks=chunks,
            offsets=offsets,
            tokens=fields.unsigned(2, most=I63_MAX),
            reason=fields.text(3),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.lease, [self.chunk_bytes, self.chunks, self.offsets], self.tokens, self.reason]


@dataclass(frozen=True, slots=True)
class LookupReply:
    """The prefix that every rank can load in tokens, its lease and the seconds it lasts, and why it ended there."""

    tokens: int
    lease: str | None
    lease_seconds: float
    reason: str

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("LOOKUP reply", payload, 4)
        return cls(
            tokens=fields.unsigned(0, most=I63_MAX),
            lease=fields.optional_text(1),
            lease_seconds=fields.seconds(2),
            reason=fields.text(3),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.tokens, self.lease, self.lease_seconds, self.reason]


Reply = (
    HelloReply
    | RegisterReply
    | StoreReply
    | RetrieveReply
    | LookupReply
    | PreparedReply
    | bool
    | int
    | dict[str, object]
    | list[object]
)


def parse_reply(verb: int, payload: list[object]) -> Reply:
    """Read the result of a verb: its object, or the single value it promises.

    Raises:
        InvalidPayload: The payload is not what the verb promises.
        UnknownVerb: This build has no such verb.
    """
    reader = _READERS.get(verb)
    if reader is None:
        raise UnknownVerb(f"this build reads no reply of verb {verb}", verb=verb)
    return reader(payload)


def parse_error(code: int, payload: list[object]) -> LMLiveError:
    """Read the error of a reply whose status is not 0.

    Raises:
        InvalidPayload: The payload is not a message and a map of fields.
    """
    fields = Fields("error reply", payload, 2)
    return from_wire(code, fields.text(0, most=_MAX_MESSAGE), fields.mapping(1))


_MAX_MESSAGE: Final = 4 * 4096  # an error's message has at most 4096 characters


def _read_true(verb: str) -> Callable[[list[object]], bool]:
    def read(payload: list[object]) -> bool:
        fields = Fields(f"{verb} reply", payload, 1)
        if not fields.flag(0):
            fields.refuse(0, "true")
        return True

    return read


def _read_flag(verb: str) -> Callable[[list[object]], bool]:
    return lambda payload: Fields(f"{verb} reply", payload, 1).flag(0)


def _read_number(verb: str) -> Callable[[list[object]], int]:
    return lambda payload: Fields(f"{verb} reply", payload, 1).unsigned(0, most=I63_MAX)


def _read_status(payload: list[object]) -> dict[str, object]:
    return Fields("STATUS reply", payload, 1).mapping(0)


def _read_events(payload: list[object]) -> list[object]:
    return Fields("EVENTS reply", payload, 1).array(0, most=MAX_REPLY_ITEMS)


_READERS: Final[dict[int, Callable[[list[object]], Reply]]] = {
    Verb.HELLO: HelloReply.from_payload,
    Verb.PING: _read_true("PING"),
    Verb.REGISTER: RegisterReply.from_payload,
    Verb.UNREGISTER: _read_true("UNREGISTER"),
    Verb.STORE: StoreReply.from_payload,
    Verb.RETRIEVE: RetrieveReply.from_payload,
    Verb.LOOKUP: LookupReply.from_payload,
    Verb.RELEASE: _read_flag("RELEASE"),
    Verb.PREPARE_STORE: PreparedReply.from_payload,
    Verb.COMMIT_STORE: StoreReply.from_payload,
    Verb.PREPARE_RETRIEVE: PreparedReply.from_payload,
    Verb.READ: _read_number("READ"),
    Verb.WRITE: _read_number("WRITE"),
    Verb.CLEAR: _read_number("CLEAR"),
    Verb.STATUS: _read_status,
    Verb.REAP: _read_flag("REAP"),
    Verb.EVENTS: _read_events,
}
