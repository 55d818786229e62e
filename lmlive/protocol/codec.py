"""Frames: a 48-byte header and one msgpack array after it.

It is not the meaning of a payload: that is ``lmlive.protocol.messages``. The rules it keeps: whatever the bytes,
decoding gives a value or a ``ProtocolError``, in time and memory bounded by the frame's length; the header's place
never changes, so a header is legible whatever version wrote it and whatever follows it.

Pure: any thread. Nothing here is shared between calls: a ``msgpack.Packer`` that two threads reuse is safe only as
long as packing runs no Python code, and the 0.2 us it saves are spent on no PING (``encode_pong`` packs nothing).
"""

import struct
from typing import Final, NamedTuple, NoReturn

import msgpack

from lmlive.errors import InternalError, InvalidPayload, ProtocolError, to_wire
from lmlive.protocol.verbs import verb_name
from lmlive.protocol.versions import FIRST

VERSION: Final = FIRST
"""The wire version of a frame whose writer names no other; which ones there are is in ``versions``."""
MAGIC: Final = b"LML1"
HEADER_FORMAT: Final = "<4sBBHQQQQq"
HEADER_BYTES: Final = 48
REQUEST: Final = 0
REPLY: Final = 1

MAX_TEXT_BYTES: Final = 4096
"""The longest string in a request, in bytes of UTF-8."""
MAX_ITEMS: Final = 4096
"""The longest array in a request. Memory for an array is taken by its announced length: this bounds it."""
FEW_ITEMS: Final = 64
"""An array may have as many items whatever the length of its frame."""
ITEM_BYTES: Final = 6
"""A longer array may have one for so many bytes of its body; a handle, the shortest item of a long array, takes 6."""
MAX_REPLY_ITEMS: Final = 65_536
"""The longest array in a reply: lists of instances and of events are longer than anything a request names."""

_HEADER: Final = struct.Struct(HEADER_FORMAT)
_AFTER_MAGIC: Final = struct.Struct(HEADER_FORMAT.replace("4s", "4x"))
_KIND_AND_CODE: Final = struct.Struct("<BH")
_KIND_AT: Final = 5
_PONG_BODY: Final = b"\x91\xc3"  # msgpack [True]
_new_tuple: Final = tuple.__new__  # what Header._make does, at half its price: every frame pays it


class Header(NamedTuple):
    """The fixed part of every message.

    Args:
        version: Wire version of the sender; the receiver judges it, not the decoder.
        kind: REQUEST or REPLY.
        code: A request's verb; a reply's status, 0 for a result and else an error's code.
        request_id: Chosen by the sender of the request, repeated in its reply.
        epoch: The server's epoch as the sender knows it; 0 for not known.
        instance_id: The sender's instance, repeated in the reply; 0 for none.
        generation: The instance's generation; 0 for not registered.
        deadline_ns: When the request ends, in the server's CLOCK_MONOTONIC; 0 for none.
    """

    version: int
    kind: int
    code: int
    request_id: int
    epoch: int
    instance_id: int
    generation: int
    deadline_ns: int


def decode_header(frame: bytes | memoryview) -> Header:
    """Read the header; its version and kind are the caller's to judge.

    Raises:
        ProtocolError: The frame is shorter than a header, or is not of this protocol.
    """
    if len(frame) < HEADER_BYTES:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes is no message: the header alone has {HEADER_BYTES}", size=len(frame)
        )
    if frame[:4] != MAGIC:
        magic = bytes(frame[:4])
        raise ProtocolError(f"the frame does not begin with {MAGIC!r}: the peer speaks another protocol", magic=magic)
    return _new_tuple(Header, _AFTER_MAGIC.unpack_from(frame))


def decode_body(frame: bytes | memoryview) -> list[object]:
    """Read the payload of a frame whose header was legible.

    A request may hold arrays of ``MAX_ITEMS``, strings of ``MAX_TEXT_BYTES`` and no maps; byte strings end with the
    frame. A reply may hold maps, and longer arrays.

    Raises:
        InvalidPayload: What follows the header is not exactly one msgpack array within the limits.
    """
    kind, code = _KIND_AND_CODE.unpack_from(frame, _KIND_AT) if len(frame) >= HEADER_BYTES else (REQUEST, 0)
    try:
        # Arrays inside each other each take the memory that they announce, and the time to fill it: so that a short
        # frame cannot announce much, it is held to what it could carry of the shortest things that come in numbers.
        most = max(FEW_ITEMS, (len(frame) - HEADER_BYTES) // ITEM_BYTES)
        if kind == REPLY:
            body = msgpack.unpackb(
                frame[HEADER_BYTES:],
                max_array_len=min(most, MAX_REPLY_ITEMS),
                max_ext_len=0,
                ext_hook=_refuse_extension,
            )
        else:
            body = msgpack.unpackb(
                frame[HEADER_BYTES:],
                max_str_len=MAX_TEXT_BYTES,
                max_array_len=min(most, MAX_ITEMS),
                max_map_len=0,
                max_ext_len=0,
                ext_hook=_refuse_extension,
            )
    except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise _illegible(kind, code, _reason(error)) from error
    if type(body) is not list:
        raise _illegible(kind, code, f"a {type(body).__name__}")
    return body


def encode_request(
    verb: int,
    request_id: int,
    payload: list[object],
    *,
    epoch: int = 0,
    instance_id: int = 0,
    generation: int = 0,
    deadline_ns: int = 0,
    version: int = VERSION,
) -> bytes:
    """Give the frame of a request."""
    header = _HEADER.pack(MAGIC, version, REQUEST, verb, request_id, epoch, instance_id, generation, deadline_ns)
    return header + _pack(payload)


def encode_reply(
    request_id: int,
    epoch: int,
    instance_id: int,
    generation: int,
    payload: list[object],
    *,
    code: int = 0,
    version: int = VERSION,
) -> bytes:
    """Give the frame of a reply; code 0 says that the payload is the result."""
    return _HEADER.pack(MAGIC, version, REPLY, code, request_id, epoch, instance_id, generation, 0) + _pack(payload)


def encode_pong(request_id: int, epoch: int, instance_id: int, generation: int, version: int = VERSION) -> bytes:
    """Give the frame of the reply to a PING: its payload is [True] and always was."""
    return _HEADER.pack(MAGIC, version, REPLY, 0, request_id, epoch, instance_id, generation, 0) + _PONG_BODY


def encode_error(
    request_id: int, epoch: int, instance_id: int, generation: int, error: BaseException, *, version: int = VERSION
) -> bytes:
    """Give the frame of a reply that says what went wrong; it does not fail, whatever the error carries."""
    code, body = pack_error(error)
    return _HEADER.pack(MAGIC, version, REPLY, code, request_id, epoch, instance_id, generation, 0) + body


def pack_error(error: BaseException) -> tuple[int, bytes]:
    """Give an error's code, and the payload [message, fields] of a reply that carries it."""
    try:
        code, message, fields = to_wire(error)
        # A path or a foreign name may hold what UTF-8 does not: the answer matters more than the character.
        return code, bytes(msgpack.packb([message, fields], unicode_errors="replace"))
    except Exception:  # noqa: BLE001 - a request whose error cannot be told must still get its one reply
        message = "the server failed on this request, and its error could not be encoded"
        return InternalError.code, _pack([message, {"type": type(error).__name__}])


def packed_size(value: object) -> int:
    """Give how many bytes a value takes in a payload."""
    return len(msgpack.packb(value))


def _pack(payload: list[object]) -> bytes:
    packed: bytes = msgpack.Packer().pack(payload)
    return packed


def _refuse_extension(code: int, content: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} ({len(content)} bytes)")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _illegible(kind: int, code: int, got: str) -> InvalidPayload:
    verb = verb_name(code) if kind == REQUEST else "reply"
    return InvalidPayload(
        f"the body of {verb} is not one msgpack array within the limits ({got})",
        verb=verb,
        position="body",
        expected="one msgpack array",
        got=got,
    )
