"""Chunk keys: what names a stored prefix, and the namespace it lives in.

Pure functions; any thread. Worker and scheduler compute the keys, so tokens never travel. A key stands for a chunk
*and everything before it*: k0 = SHA-256("lmlive/1" + msgpack [adapter, salt]), and each chunk's key is SHA-256 of the
key before it followed by the chunk's token ids as little-endian uint32. A partial chunk at the end has no key.
"""

import hashlib
from array import array
from collections.abc import Iterable
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from lmlive.errors import InvalidArgument

KEY_BYTES = 32
TAG_BYTES = 16
MAX_TOKEN_ID = 2**32 - 1

_ROOT = b"lmlive/1"


class Namespace(NamedTuple):
    """Where a chunk key means one thing: chunks of two namespaces never meet."""

    model: str
    revision: str
    layout_key: bytes
    rank: int
    world_size: int


def chunk_keys(token_ids: Iterable[int], *, chunk_tokens: int, adapter: str = "", salt: str = "") -> list[bytes]:
    """Give the key of every whole chunk of a prompt, first to last.

    Args:
        token_ids: The prompt: integers from 0 to 2**32 - 1, in a sequence, a numpy array or a CPU tensor.
        chunk_tokens: Tokens per chunk, as the server told.
        adapter: Name of the adapter (LoRA) that computed the KV; another name is another key.
        salt: Keeps tenants apart; another salt is another key.
    """
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise InvalidArgument("chunk_tokens must be an int of at least 1", field="chunk_tokens", value=chunk_tokens)
    key = hashlib.sha256(_ROOT + _pack(adapter, salt)).digest()
    tokens = memoryview(_as_uint32(token_ids).tobytes())
    step = 4 * chunk_tokens
    keys = []
    for start in range(0, len(tokens) - step + 1, step):
        digest = hashlib.sha256(key)
        digest.update(tokens[start : start + step])
        key = digest.digest()
        keys.append(key)
    return keys


def salt_tag(salt: str) -> bytes:
    """Give the 16 bytes under which a salt's bytes are counted; zeros for no salt."""
    if not salt:
        return bytes(TAG_BYTES)
    return hashlib.sha256(_text("salt", salt)).digest()[:TAG_BYTES]


def split_keys(joined: bytes) -> list[bytes]:
    """Cut the wire's concatenated keys apart; their length is a multiple of 32, checked where it was decoded.

    Numpy makes the pieces at a sixth of the cost of slicing them; as void, because text would lose zeros at its end.
    """
    keys: list[bytes] = np.frombuffer(joined, f"V{KEY_BYTES}").tolist()
    return keys


def _pack(adapter: str, salt: str) -> bytes:
    _text("adapter", adapter)
    _text("salt", salt)
    packed: bytes = msgpack.packb([adapter, salt])
    return packed


def _text(field: str, value: object) -> bytes:
    if not isinstance(value, str):
        raise InvalidArgument(f"{field} must be a str", field=field, value=repr(value))
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} must be valid unicode text", field=field, value=repr(value)) from None


def _as_uint32(token_ids: Iterable[int]) -> npt.NDArray[np.uint32]:
    """Give the ids as little-endian uint32, or say which rule they break.

    ``array`` refuses floats, text and numbers out of range by itself, at a third of numpy's cost for a list.
    """
    if hasattr(token_ids, "dtype"):
        return _from_tensor(token_ids)
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidArgument("token_ids must be a sequence of ints", field="token_ids", value=type(token_ids).__name__)
    try:
        tokens = array("I", token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(
            f"token_ids must be ints from 0 to {MAX_TOKEN_ID}", field="token_ids", value=str(error)
        ) from None
    return np.frombuffer(tokens, dtype=np.uint32).astype("<u4", copy=False)


def _from_tensor(token_ids: object) -> npt.NDArray[np.uint32]:
    try:
        tokens = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument("token_ids must be in CPU memory", field="token_ids", value=str(error)) from None
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise InvalidArgument(
            "token_ids must be one axis of integers", field="token_ids", value=f"{tokens.dtype} {tokens.shape}"
        )
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > MAX_TOKEN_ID):
        raise InvalidArgument(f"token_ids must be from 0 to {MAX_TOKEN_ID}", field="token_ids")
    return np.ascontiguousarray(tokens, dtype="<u4")
