"""One store or retrieve, checked: what the caller asked for, and the payload it makes for a given server.

Pure, no I/O. The payload depends on the server's chunk size, which may be another one after a restart; hence it is made
for each attempt, and the keys are kept as long as the size stays.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from lmlive.cache.keys import chunk_keys, salt_tag
from lmlive.errors import MessageTooLarge
from lmlive.protocol.verbs import Verb
from lmlive.worker.blocks import Blocks
from lmlive.worker.hello import ServerFacts

ANY_CHUNK: Final = 2**48
"""A chunk size that no prompt fills: hashing by it checks the arguments and computes nothing."""


@dataclass(slots=True, eq=False, kw_only=True)
class Order:
    """What the caller asked for.

    Args:
        verb: STORE or RETRIEVE.
        token_ids: The prompt.
        blocks: Where its KV is, or is to be.
        adapter: Part of the keys.
        salt: Part of the keys.
        lease: Of a lookup; RETRIEVE only.
        deadline: Seconds of CLOCK_MONOTONIC.
    """

    verb: Verb
    token_ids: Any
    blocks: Blocks
    adapter: str
    salt: str
    lease: str | None = None
    deadline: float
    _keys: tuple[int, bytes] = field(default=(0, b""), repr=False)

    def keys(self, chunk_tokens: int) -> bytes:
        """Give the keys of all whole chunks, joined.

        Raises:
            InvalidArgument: The prompt is no sequence of token ids, or a text argument is none.
        """
        if self._keys[0] != chunk_tokens:
            keys = chunk_keys(self.token_ids, chunk_tokens=chunk_tokens, adapter=self.adapter, salt=self.salt)
            self._keys = chunk_tokens, b"".join(keys)
        return self._keys[1]

    def is_empty(self, chunk_tokens: int) -> bool:
        """Tell whether there is nothing to ask for: no whole chunk, or none that a retrieve does not skip."""
        least = self.blocks.skip_tokens if self.verb is Verb.RETRIEVE else 0
        return self.blocks.whole_tokens(chunk_tokens) <= least

    def payload(self, facts: ServerFacts) -> list[object]:
        """Give the request's payload for this server.

        Raises:
            MessageTooLarge: The prompt is longer than the server takes.
        """
        size = facts.chunk_tokens
        tokens = self.blocks.whole_tokens(size)
        if tokens > facts.limits["tokens"]:
            raise MessageTooLarge("the prompt is longer than this server takes", size=tokens, limit="tokens")
        packed = self.blocks.wire(size)
        if max(map(len, packed)) > 4 * facts.limits["blocks"]:
            raise MessageTooLarge("the prompt has more blocks than this server takes", limit="blocks")
        last = self.lease if self.verb is Verb.RETRIEVE else salt_tag(self.salt)
        return [self.keys(size), packed, self.blocks.skip_tokens, last]
