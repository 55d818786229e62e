"""Requests that move or keep KV: STORE, RETRIEVE, LOOKUP, RELEASE and the engine-driven five.

It is not the copy, nor whether a block id lies inside the layout: here only types, ranges and lengths are checked.
Ids of blocks and keys stay packed bytes, because building 256 integers costs more than all the rest of a STORE.

Pure: any thread.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, Self

from lmlive.protocol.fields import I63_MAX, Fields
from lmlive.protocol.parts import MAX_GROUPS
from lmlive.protocol.verbs import Verb

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
BLOCK_ID_BYTES: Final = 4
MAX_BULK_BYTES: Final = 64 << 20
"""Bytes that one READ may ask for, and one WRITE may bring."""
MAX_FRAMES: Final = 64
"""Frames of one message, the first included; a longer one is read to its end and refused."""
MAX_RANKS: Final = 4096
"""The largest world size; a LOOKUP asks about each rank, so this bounds what one request may cost."""


@dataclass(frozen=True, slots=True)
class Store:
    """Copy whole chunks out of the worker's blocks; ``blocks`` holds uint32 ids, little-endian, for each group."""

    verb: ClassVar[Verb] = Verb.STORE

    keys: bytes
    blocks: tuple[bytes, ...]
    skip_tokens: int
    tag: bytes

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("STORE", payload, 4)
        return cls(
            keys=fields.packed(0, KEY_BYTES),
            blocks=_read_blocks(fields, 1),
            skip_tokens=fields.unsigned(2, most=I63_MAX),
            tag=fields.binary(3, (TAG_BYTES,)),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.keys, list(self.blocks), self.skip_tokens, self.tag]


@dataclass(frozen=True, slots=True)
class Retrieve:
    """Copy whole chunks into the worker's blocks."""

    verb: ClassVar[Verb] = Verb.RETRIEVE

    keys: bytes
    blocks: tuple[bytes, ...]
    skip_tokens: int
    lease: str | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("RETRIEVE", payload, 4)
        return cls(
            keys=fields.packed(0, KEY_BYTES),
            blocks=_read_blocks(fields, 1),
            skip_tokens=fields.unsigned(2, most=I63_MAX),
            lease=fields.optional_text(3),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.keys, list(self.blocks), self.skip_tokens, self.lease]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask how long a prefix every rank can load, and keep it for a while; with a lease, renew that one."""

    verb: ClassVar[Verb] = Verb.LOOKUP

    model: str
    revision: str
    world_size: int
    keys: bytes
    lease: str | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("LOOKUP", payload, 5)
        return cls(
            model=fields.text(0),
            revision=fields.text(1),
            world_size=fields.unsigned(2, least=1, most=MAX_RANKS),
            keys=fields.packed(3, KEY_BYTES),
            lease=fields.optional_text(4),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.model, self.revision, self.world_size, self.keys, self.lease]


@dataclass(frozen=True, slots=True)
class Release:
    """End a lease."""

    verb: ClassVar[Verb] = Verb.RELEASE

    lease: str

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        return cls(lease=Fields("RELEASE", payload, 1).text(0))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.lease]


@dataclass(frozen=True, slots=True)
class PrepareStore:
    """Ask for slots to write chunks into (engine-driven)."""

    verb: ClassVar[Verb] = Verb.PREPARE_STORE

    keys: bytes
    skip_tokens: int
    tag: bytes

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("PREPARE_STORE", payload, 3)
        return cls(
            keys=fields.packed(0, KEY_BYTES),
            skip_tokens=fields.unsigned(1, most=I63_MAX),
            tag=fields.binary(2, (TAG_BYTES,)),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.keys, self.skip_tokens, self.tag]


@dataclass(frozen=True, slots=True)
class CommitStore:
    """Publish what was written into the slots of a lease (engine-driven)."""

    verb: ClassVar[Verb] = Verb.COMMIT_STORE

    lease: str
    checksums: bytes | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("COMMIT_STORE", payload, 2)
        return cls(lease=fields.text(0), checksums=fields.optional_binary(1))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.lease, self.checksums]


@dataclass(frozen=True, slots=True)
class PrepareRetrieve:
    """Ask for slots to read chunks from (engine-driven)."""

    verb: ClassVar[Verb] = Verb.PREPARE_RETRIEVE

    keys: bytes
    skip_tokens: int
    lease: str | None

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("PREPARE_RETRIEVE", payload, 3)
        return cls(
            keys=fields.packed(0, KEY_BYTES),
            skip_tokens=fields.unsigned(1, most=I63_MAX),
            lease=fields.optional_text(2),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.keys, self.skip_tokens, self.lease]


@dataclass(frozen=True, slots=True)
class Read:
    """Ask for bytes of the slots of a prepared retrieve, counted over all of them in order (strategy inline)."""

    verb: ClassVar[Verb] = Verb.READ

    lease: str
    position: int
    nbytes: int

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("READ", payload, 3)
        return cls(
            lease=fields.text(0),
            position=fields.unsigned(1, most=I63_MAX),
            nbytes=fields.unsigned(2, least=1, most=MAX_BULK_BYTES),
        )

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.lease, self.position, self.nbytes]


@dataclass(frozen=True, slots=True)
class Write:
    """Bring bytes for the slots of a reservation, in the frames behind this one (strategy inline)."""

    verb: ClassVar[Verb] = Verb.WRITE

    lease: str
    position: int

    @classmethod
    def from_payload(cls, payload: list[object]) -> Self:
        """Read the payload."""
        fields = Fields("WRITE", payload, 2)
        return cls(lease=fields.text(0), position=fields.unsigned(1, most=I63_MAX))

    def to_payload(self) -> list[object]:
        """Give the wire's array."""
        return [self.lease, self.position]


def _read_blocks(fields: Fields, position: int) -> tuple[bytes, ...]:
    groups = fields.each(position, most=MAX_GROUPS)
    return tuple(groups.packed(at, BLOCK_ID_BYTES) for at in groups.positions())
