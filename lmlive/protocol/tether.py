"""What goes over the tether: the unix SOCK_SEQPACKET socket that ties a worker's process to the server.

One packet is one msgpack array. The server speaks first, with a ``Greeting``; the worker sends an ``Offer`` for each
batch of descriptors, which travel beside it as SCM_RIGHTS; the server answers each with a ``Receipt``, or with an
error: [code, message, fields]. A worker that copies by itself asks for the pool with a ``PoolRequest``; a ``PoolGrant``
comes with its descriptors.

It is not the socket itself: descriptors and who the peer is are the business of the shells. Pure: any thread.
"""

from dataclasses import dataclass
from typing import Final, Self

import msgpack

from lmlive.errors import InvalidPayload, LMLiveError, from_wire
from lmlive.protocol.codec import pack_error
from lmlive.protocol.fields import I63_MAX, U32_MAX, Fields
from lmlive.protocol.messages import SECRET_BYTES
from lmlive.protocol.verbs import Role

MAX_FDS: Final = 64
"""The most descriptors beside one packet."""
MAX_TABLE_FDS: Final = 4096
"""The most descriptors of one table: as many as one REGISTER may name handles."""
MAX_PACKET_BYTES: Final = 65_536
"""The longest packet; receive with this much room, so that nothing is cut off."""
_POOL: Final = "pool"
_POOL_WORDS: Final = 4


@dataclass(frozen=True, slots=True)
class Greeting:
    """The server's first word: which server answers here.

    Args:
        epoch: The server's epoch; another than the ROUTER's means another server.
    """

    epoch: int

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Read a packet."""
        return cls(epoch=Fields("tether greeting", _unpack(packet, "tether greeting"), 1).unsigned(0))

    def encode(self) -> bytes:
        """Give the packet."""
        return _pack([self.epoch])


@dataclass(frozen=True, slots=True)
class Offer:
    """Who is on this tether, and which descriptors come beside this packet.

    Args:
        secret: The worker's, as in its HELLO.
        instance_id: The worker's instance; 0 for a scheduler.
        role: Who opened the tether.
        first: Place in the table of the first descriptor beside this packet; 0 begins a new table.
        count: How many come beside it.
    """

    secret: bytes
    instance_id: int
    role: Role
    first: int
    count: int

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Read a packet."""
        fields = Fields("tether offer", _unpack(packet, "tether offer"), 5)
        count = fields.unsigned(4, most=MAX_FDS)
        return cls(
            secret=fields.binary(0, (SECRET_BYTES,)),
            instance_id=fields.unsigned(1),
            role=Role(fields.unsigned(2, least=min(Role), most=max(Role))),
            first=fields.unsigned(3, most=MAX_TABLE_FDS - count),
            count=count,
        )

    def encode(self) -> bytes:
        """Give the packet."""
        return _pack([self.secret, self.instance_id, int(self.role), self.first, self.count])


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server's answer to an offer.

    Args:
        received: How many descriptors the table holds now.
    """

    received: int

    def encode(self) -> bytes:
        """Give the packet."""
        return _pack([self.received])


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """The wish of a worker to copy to and from the server's pool by itself.

    Args:
        secret: The worker's, as in its offer.
        instance_id: The worker's instance.
        role: Who opened the tether.
    """

    secret: bytes
    instance_id: int
    role: Role

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Read a packet."""
        fields = Fields("tether pool request", _unpack(packet, "tether pool request"), 4)
        fields.one_of(3, (_POOL,))
        return cls(
            secret=fields.binary(0, (SECRET_BYTES,)),
            instance_id=fields.unsigned(1),
            role=Role(fields.unsigned(2, least=min(Role), most=max(Role))),
        )

    def encode(self) -> bytes:
        """Give the packet."""
        return _pack([self.secret, self.instance_id, int(self.role), _POOL])


@dataclass(frozen=True, slots=True)
class PoolGrant:
    """The server's answer to a wish for the pool: two descriptors, the first for reading, the second for writing too.

    Args:
        nbytes: How much of the memory is the pool.
        count: How many descriptors come beside it.
    """

    nbytes: int
    count: int = 2

    def encode(self) -> bytes:
        """Give the packet."""
        return _pack([self.nbytes, self.count])


def decode_word(packet: bytes) -> Offer | PoolRequest:
    """Read what a peer says.

    Raises:
        InvalidPayload: It is neither an offer nor a wish for the pool.
    """
    return PoolRequest.decode(packet) if len(_unpack(packet, "tether offer")) == _POOL_WORDS else Offer.decode(packet)


def encode_refusal(error: BaseException) -> bytes:
    """Give the packet that answers an offer with an error."""
    code, body = pack_error(error)
    message, fields = msgpack.unpackb(body)
    packet = _pack([code, message, fields])
    return packet if len(packet) <= MAX_PACKET_BYTES else _pack([code, message, {}])


def decode_answer(packet: bytes) -> Receipt | PoolGrant | LMLiveError:
    """Read what the server says to an offer, or to a wish for the pool.

    Raises:
        InvalidPayload: It is no answer.
    """
    values = _unpack(packet, "tether answer")
    if len(values) == 1:
        return Receipt(received=Fields("tether answer", values, 1).unsigned(0, most=U32_MAX))
    if len(values) == 2:
        fields = Fields("tether answer", values, 2)
        return PoolGrant(nbytes=fields.unsigned(0, least=1, most=I63_MAX), count=fields.unsigned(1, most=MAX_FDS))
    fields = Fields("tether answer", values, 3)
    return from_wire(fields.unsigned(0, most=65_535), fields.text(1, most=MAX_PACKET_BYTES), fields.mapping(2))


def _pack(values: list[object]) -> bytes:
    return bytes(msgpack.packb(values))


def _unpack(packet: bytes, name: str) -> list[object]:
    try:
        values = msgpack.unpackb(packet, max_array_len=MAX_FDS, max_ext_len=0)
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise _illegible(name, f"{type(error).__name__}: {error}"[:200]) from error
    if type(values) is not list:
        raise _illegible(name, f"a {type(values).__name__}")
    return values


def _illegible(name: str, got: str) -> InvalidPayload:
    return InvalidPayload(
        f"the {name} is not one msgpack array within the limits ({got})",
        verb=name,
        position="body",
        expected="one msgpack array",
        got=got,
    )
