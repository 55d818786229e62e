"""What goes over the tether: the unix SOCK_SEQPACKET socket that ties a worker's process to the server.

One packet is one msgpack array. The server speaks first, with a ``Greeting``; the worker sends an ``Offer`` for each
batch of descriptors, which travel beside it as SCM_RIGHTS; the server answers each with a ``Receipt``, or with an
error: [code, message, fields].

It is not the socket itself: descriptors and who the peer is are the business of the shells. Pure: any thread.
"""

from dataclasses import dataclass
from typing import Final, Self

import msgpack

from lmlive.errors import InvalidPayload, LMLiveError, from_wire
from lmlive.protocol.codec import pack_error
from lmlive.protocol.fields import U32_MAX, Fields
from lmlive.protocol.messages import SECRET_BYTES
from lmlive.protocol.verbs import Role

MAX_FDS: Final = 64
"""The most descriptors beside one packet."""
MAX_TABLE_FDS: Final = 4096
"""The most descriptors of one table: as many as one REGISTER may name handles."""
MAX_PACKET_BYTES: Final = 65_536
"""The longest packet; receive with this much room, so that nothing is cut off."""


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


def encode_refusal(error: BaseException) -> bytes:
    """Give the packet that answers an offer with an error."""
    code, body = pack_error(error)
    message, fields = msgpack.unpackb(body)
    packet = _pack([code, message, fields])
    return packet if len(packet) <= MAX_PACKET_BYTES else _pack([code, message, {}])


def decode_answer(packet: bytes) -> Receipt | LMLiveError:
    """Read what the server says to an offer.

    Raises:
        InvalidPayload: It is neither a receipt nor an error.
    """
    values = _unpack(packet, "tether answer")
    if len(values) == 1:
        return Receipt(received=Fields("tether answer", values, 1).unsigned(0, most=U32_MAX))
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
