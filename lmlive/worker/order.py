"""One store or retrieve, checked: what the caller asked for, and the payload it makes for a given server.

No I/O. The payload depends on the server's chunk size, which may be another one after a restart; hence it is made for
each attempt. The loop that owns the worker.
"""

from dataclasses import dataclass

from lmlive.cache.keys import salt_tag
from lmlive.errors import MessageTooLarge
from lmlive.protocol.transfers import BLOCK_ID_BYTES
from lmlive.protocol.verbs import Verb
from lmlive.worker.blocks import Blocks
from lmlive.worker.crew import Crew
from lmlive.worker.hello import ServerFacts
from lmlive.worker.prompt import Prompt


@dataclass(slots=True, eq=False, kw_only=True)
class Order:
    """What the caller asked for.

    Args:
        verb: STORE or RETRIEVE.
        prompt: The tokens, and what else makes the keys.
        blocks: Where its KV is, or is to be.
        lease: Of a lookup; RETRIEVE only.
        deadline: Seconds of CLOCK_MONOTONIC.
    """

    verb: Verb
    prompt: Prompt
    blocks: Blocks
    lease: str | None = None
    deadline: float

    def is_empty(self, chunk_tokens: int) -> bool:
        """Tell whether there is nothing to ask for: no whole chunk, or none that a retrieve does not skip."""
        least = self.blocks.skip_tokens if self.verb is Verb.RETRIEVE else 0
        return self.blocks.whole_tokens(chunk_tokens) <= least

    async def payload(self, facts: ServerFacts, crew: Crew) -> list[object]:
        """Give the request's payload for this server.

        Raises:
            MessageTooLarge: The prompt is longer than the server takes; fields ``size`` and ``limit``.
            RequestTimeout: A long prompt found no thread to be hashed in before the deadline.
        """
        self.prompt.check_length(facts)
        packed = self.blocks.wire(facts.chunk_tokens)
        most, limit = max(map(len, packed)) // BLOCK_ID_BYTES, facts.limits["blocks"]
        if most > limit:
            raise MessageTooLarge("the prompt has more blocks than this server takes", size=most, limit=limit)
        keys = await self.prompt.hash(facts, crew, start_by=self.deadline)
        last = self.lease if self.verb is Verb.RETRIEVE else salt_tag(self.prompt.salt)
        return [keys, packed, self.blocks.skip_tokens, last]
