"""A prompt and its keys, however long it is: a long one is hashed in a thread, so that the engine's loop goes on.

A thread alone would not do it, because reading a list holds the GIL from end to end: a long list is read in pieces.

The loop that owns the worker or scheduler; what takes long runs in its crew.
"""

import functools
from array import array
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from lmlive.cache.keys import chunk_keys
from lmlive.errors import InvalidArgument, MessageTooLarge
from lmlive.worker.crew import Crew
from lmlive.worker.hello import ServerFacts

LONG: Final = 65_536
"""Tokens up to which a prompt is hashed on the loop: a millisecond."""
ANY_CHUNK: Final = 2**48
"""A chunk size that no prompt fills: hashing by it checks the arguments and computes nothing."""

_PIECE = 16_384


@dataclass(slots=True, eq=False)
class Prompt:
    """What is asked about. The keys depend on the server's chunk size, and are kept as long as that stays.

    Args:
        token_ids: The tokens; they must stay as they are during the call.
        tokens: Their number, as counted before.
        adapter: Part of the keys.
        salt: Part of the keys.
    """

    token_ids: Any
    tokens: int
    adapter: str
    salt: str
    _keys: tuple[int, bytes] = field(default=(0, b""), repr=False)

    def whole_tokens(self, chunk_tokens: int) -> int:
        """Give the tokens of all whole chunks."""
        return self.tokens // chunk_tokens * chunk_tokens

    def check_length(self, facts: ServerFacts) -> None:
        """Refuse a prompt that is longer than a server takes.

        Raises:
            MessageTooLarge: Fields ``size`` and ``limit``, in tokens.
        """
        size, limit = self.whole_tokens(facts.chunk_tokens), facts.limits["tokens"]
        if size > limit:
            raise MessageTooLarge("the prompt is longer than this server takes", size=size, limit=limit)

    async def hash(self, facts: ServerFacts | None, crew: Crew, *, start_by: float) -> bytes:
        """Give the keys of all whole chunks for this server, joined.

        Without a server, and of a prompt that is longer than it takes, it is only checked what they are made of.

        Args:
            facts: The server's.
            crew: Hashes a long prompt.
            start_by: When a thread must have been free for that.

        Raises:
            InvalidArgument: The prompt is no sequence of token ids, or a text argument is none.
            RequestTimeout: No thread was free in time.
        """
        size = ANY_CHUNK
        if facts is not None and self.whole_tokens(facts.chunk_tokens) <= facts.limits["tokens"]:
            size = facts.chunk_tokens
        if self._keys[0] != size:
            if self.tokens <= LONG:
                keys = self._joined(self.token_ids, size)
            else:
                keys = await crew.run(functools.partial(self._hash_long, size), start_by=start_by)
            self._keys = size, keys
        return self._keys[1]

    def _joined(self, token_ids: Any, chunk_tokens: int) -> bytes:
        return b"".join(chunk_keys(token_ids, chunk_tokens=chunk_tokens, adapter=self.adapter, salt=self.salt))

    def _hash_long(self, chunk_tokens: int) -> bytes:
        read = _read_list(self.token_ids) if isinstance(self.token_ids, (list, tuple)) else self.token_ids
        if len(read) != self.tokens:
            raise InvalidArgument("token_ids must stay as they are during the call", field="token_ids", value=len(read))
        return self._joined(read, chunk_tokens)


def _read_list(token_ids: Any) -> Any:
    """Give a list's ids as an array; the list itself where it holds something else, for the keys to say what."""
    try:
        pieces = [array("I", token_ids[at : at + _PIECE]) for at in range(0, len(token_ids), _PIECE)]
    except (TypeError, ValueError, OverflowError):
        return token_ids
    return np.concatenate([np.frombuffer(piece, dtype=np.uint32) for piece in pieces])
