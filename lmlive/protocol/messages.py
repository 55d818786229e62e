"""Every request as a frozen object, read from a payload and turned back into one.

It is not the frame around it (``lmlive.protocol.codec``). Requests that move KV stand in ``transfers``, replies in
``replies``; their names are given here too. The rule: ``from_payload`` accepts exactly what ``to_payload`` can give,
and refuses the rest with ``InvalidPayload``.

Pure: any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from lmlive.errors import InvalidPayload, UnknownVerb
from lmlive.protocol.codec import Header
from lmlive.protocol.fields import Fields
from lmlive.protocol.parts import (
    MAX_GROUPS,
    MAX_HANDLES,
    CudaHandle,
    FdHandle,
    Group,
    Handle,
    Plane,
    read_groups,
    read_handles,
)
from lmlive.protocol.replies import (
    HelloReply,
    LookupReply,
    PreparedReply,
    RegisterReply,
    RetrieveReply,
    StoreReply,
    parse_error,
    parse_reply,
)
from lmlive.protocol.transfers import (
    MAX_RANKS,
    CommitStore,
    Lookup,
    PrepareRetrieve,
    PrepareStore,
    Read,
    Release,
    Retrieve,
    Store,
    Write,
)
from lmlive.protocol.verbs import Role, Verb

__all__ = [
    "Clear",
    "CommitStore",
    "CudaHandle",
    "Events",
    "FdHandle",
    "Group",
    "Handle",
    "Hello",
    "HelloReply",
    "Lookup",
    "LookupReply",
    "Ping",
    "Plane",
    "PrepareRetrieve",
    "PrepareStore",
    "PreparedReply",
    "Read",
    "Reap",
    "Register",
    "RegisterReply",
    "Release",
    "Request",
    "Retrieve",
    "RetrieveReply",
    "Status",
    "Store",
    "StoreReply",
    "Unregister",
    "Write",
    "check_ping",
    "parse_error",
    "parse_reply",
    "parse_request",
]

SECRET_BYTES: Final = 16
MODES: Final = ("none", "server_driven", "engine_driven")


@dataclass(frozen=True, slots=True)
class Hello:
    """Say who speaks and which versions it speaks; the first request of a connection."""

    verb: ClassVar[Verb] = Verb.HELLO

    min_version: int
    max_version: int
    role: Role
    software: str
    secret: bytes

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("HELLO", payload, 5)
        return cls(
            min_version=fields.unsigned(0, most=255),
            max_version=fields.unsigned(1, most=255),
            role=Role(fields.unsigned(2, least=min(Role), most=max(Role))),
            software=fields.text(3),
            secret=fields.binary(4, (SECRET_BYTES,)),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.min_version, self.max_version, int(self.role), self.software, self.secret]


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask for an answer; with an instance, be a sign of its life."""

    verb: ClassVar[Verb] = Verb.PING

    instance_id: int | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        return cls(instance_id=Fields("PING", payload, 1).optional_unsigned(0, least=1))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.instance_id]


def check_ping(payload: list[object], header: Header) -> Ping:
    """Read a PING and compare it with its header: the same instance, or nil where the header has 0.

    Raises:
        InvalidPayload: It has another count or type, or names another instance than the header.
    """
    ping = Ping.from_payload(payload)
    if (ping.instance_id or 0) != header.instance_id:
        expected = str(header.instance_id or "nil")
        raise InvalidPayload(
            f"PING names instance {ping.instance_id}, its header {expected}: send the same id in both places",
            verb="PING",
            position=0,
            expected=expected,
            got=str(ping.instance_id or "nil"),
        )
    return ping


@dataclass(frozen=True, slots=True)
class Register:
    """Bring an instance, and the memory that holds its KV, or ``mode`` "none" without any."""

    verb: ClassVar[Verb] = Verb.REGISTER

    secret: bytes
    model: str
    revision: str
    rank: int
    world_size: int
    kv_dtype: str
    format: str
    mode: str
    strategy: str
    groups: tuple[Group, ...]
    handles: tuple[Handle, ...]

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("REGISTER", payload, 11)
        world_size = fields.unsigned(4, least=1, most=MAX_RANKS)
        handles = read_handles(fields.each(10, most=MAX_HANDLES))
        mode = fields.one_of(7, MODES)
        # An engine that copies by itself shares no memory: its planes name handle 0, which is none.
        handle_count = 1 if mode == "engine_driven" and not handles else len(handles)
        return cls(
            secret=fields.binary(0, (SECRET_BYTES,)),
            model=fields.text(1),
            revision=fields.text(2),
            rank=fields.unsigned(3, most=world_size - 1),
            world_size=world_size,
            kv_dtype=fields.text(5),
            format=fields.text(6),
            mode=mode,
            strategy=fields.text(8),
            groups=read_groups(fields.each(9, most=MAX_GROUPS), handle_count),
            handles=handles,
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [
            self.secret,
            self.model,
            self.revision,
            self.rank,
            self.world_size,
            self.kv_dtype,
            self.format,
            self.mode,
            self.strategy,
            [group.to_payload() for group in self.groups],
            [handle.to_payload() for handle in self.handles],
        ]


@dataclass(frozen=True, slots=True)
class Unregister:
    """End an instance and its secret; answered when its memory is released."""

    verb: ClassVar[Verb] = Verb.UNREGISTER

    secret: bytes

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        return cls(secret=Fields("UNREGISTER", payload, 1).binary(0, (SECRET_BYTES,)))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.secret]


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop the chunks of a model, or all."""

    verb: ClassVar[Verb] = Verb.CLEAR

    model: str | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        return cls(model=Fields("CLEAR", payload, 1).optional_text(0))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.model]


@dataclass(frozen=True, slots=True)
class Status:
    """Ask for the server's whole status."""

    verb: ClassVar[Verb] = Verb.STATUS

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        Fields("STATUS", payload, 0)
        return cls()

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return []


@dataclass(frozen=True, slots=True)
class Reap:
    """Remove an instance by an operator's word; with a generation, only that one."""

    verb: ClassVar[Verb] = Verb.REAP

    instance_id: int
    generation: int | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("REAP", payload, 2)
        return cls(instance_id=fields.unsigned(0), generation=fields.optional_unsigned(1))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.instance_id, self.generation]


@dataclass(frozen=True, slots=True)
class Events:
    """Ask what happened after a sequence number, at most so many events."""

    verb: ClassVar[Verb] = Verb.EVENTS

    after_seq: int
    maximum: int

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("EVENTS", payload, 2)
        return cls(after_seq=fields.unsigned(0), maximum=fields.unsigned(1))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.after_seq, self.maximum]


Request = (
    Hello
    | Ping
    | Register
    | Unregister
    | Store
    | Retrieve
    | Lookup
    | Release
    | PrepareStore
    | CommitStore
    | PrepareRetrieve
    | Read
    | Write
    | Clear
    | Status
    | Reap
    | Events
)


def parse_request(verb: int, payload: list[object]) -> Request:
    """Read the payload of a request.

    Raises:
        InvalidPayload: It is not what the verb takes.
        UnknownVerb: This build has no such verb.
    """
    reader = _READERS.get(verb)
    if reader is None:
        raise UnknownVerb(f"verb {verb} is not in this build: see the table of verbs", verb=verb)
    return reader(payload)


_READERS: Final[dict[int, Callable[[list[object]], Request]]] = {
    request.verb: request.from_payload
    for request in (
        Hello,
        Ping,
        Register,
        Unregister,
        Store,
        Retrieve,
        Lookup,
        Release,
        PrepareStore,
        CommitStore,
        PrepareRetrieve,
        Read,
        Write,
        Clear,
        Status,
        Reap,
        Events,
    )
}
