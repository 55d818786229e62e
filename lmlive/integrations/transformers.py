"""Hugging Face transformers on a paged KV cache whose memory is registered with lmlive.

``PagedCache`` owns the blocks of all layers in shared memory, ``PagedSequence`` is the transformers cache of one
sequence over some of these blocks, and ``PrefixEngine`` generates greedily, one sequence at a time: it loads the
longest prefix that the server holds, computes the rest, and stores what is new.

It is not a serving engine: no batching, no sampling, no preemption.
Everything runs on the caller's event loop thread; forward passes block it, as they do in any engine step.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from lmlive.clock import MonotonicClock
from lmlive.device.memory import shared_empty
from lmlive.errors import InvalidArgument
from lmlive.worker.scheduler import Scheduler
from lmlive.worker.worker import Worker


class PagedCache:
    """The KV blocks of all layers of one model, in memory that lmlive can map.

    Args:
        config: The model's configuration; its layers must all use full attention.
        num_blocks: Blocks per layer.
        block_tokens: Tokens per block.
        dtype: The element type of keys and values.

    Attributes:
        kv_caches: Layer name -> tensor ``[2, num_blocks, block_tokens, kv_heads, head_dim]`` (keys, values); hand it
            to ``lmlive.Worker`` with ``block_axis=1``.
    """

    BLOCK_AXIS = 1

    def __init__(
        self, config: PretrainedConfig, *, num_blocks: int, block_tokens: int = 16, dtype: torch.dtype = torch.float32
    ) -> None:
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, num_blocks, block_tokens, kv_heads, head_dim)
        self.block_tokens = block_tokens
        self.kv_caches: dict[str, torch.Tensor] = {
            f"layers.{index}": shared_empty(shape, dtype) for index in range(config.num_hidden_layers)
        }
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        """Give the number of blocks that no sequence uses."""
        return len(self._free)

    def allocate(self, tokens: int) -> list[int]:
        """Take the blocks for a sequence of at most ``tokens`` tokens.

        Raises:
            InvalidArgument: Too few blocks are free; nothing is taken.
        """
        count = -(-tokens // self.block_tokens)
        if count > len(self._free):
            raise InvalidArgument(
                f"{tokens} tokens need {count} blocks and {len(self._free)} are free: free a sequence or make the "
                "cache larger",
                needed=count,
                free=len(self._free),
            )
        return [self._free.pop() for _ in range(count)]

    def free(self, block_ids: list[int]) -> None:
        """Give blocks back; the caller names none that a transfer may still touch."""
        self._free.extend(reversed(block_ids))


class _PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers is half typed
    """One layer of one sequence: keys and values live in the blocks, and nowhere else."""

    is_sliding = False

    def __init__(self, blocks: torch.Tensor, block_ids: torch.Tensor, block_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = blocks
        self._block_ids = block_ids
        self._block_tokens = block_tokens
        self.length = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens ``[1, heads, tokens, head_dim]`` and give all keys and values in the same shape."""
        new = key_states.shape[2]
        positions = torch.arange(self.length, self.length + new)
        blocks = self._block_ids[positions // self._block_tokens]
        slots = positions % self._block_tokens
        self._blocks[0, blocks, slots] = key_states[0].transpose(0, 1)
        self._blocks[1, blocks, slots] = value_states[0].transpose(0, 1)
        self.length += new
        return self._read(0), self._read(1)

    def _read(self, which: int) -> torch.Tensor:
        used = self._block_ids[: -(-self.length // self._block_tokens)]
        tokens = self._blocks[which, used].flatten(0, 1)[: self.length]
        return tokens.transpose(0, 1).unsqueeze(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give (kv length after the query, offset) for the attention mask."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Give the number of tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """Give the number of tokens that the blocks have room for."""
        return len(self._block_ids) * self._block_tokens


class PagedSequence(Cache):
    """The transformers cache of one sequence over some blocks of a ``PagedCache``.

    Args:
        paged: The cache that owns the blocks.
        block_ids: The sequence's blocks, in order from token 0.
        loaded_tokens: How many tokens from token 0 the blocks hold already.
    """

    def __init__(self, paged: PagedCache, block_ids: list[int], *, loaded_tokens: int = 0) -> None:
        ids = torch.tensor(block_ids, dtype=torch.int64)
        layers: list[Any] = [_PagedLayer(blocks, ids, paged.block_tokens) for blocks in paged.kv_caches.values()]
        for layer in layers:
            layer.length = loaded_tokens
        super().__init__(layers=layers)


@dataclass(frozen=True)
class Generation:
    """What one ``PrefixEngine.generate`` did.

    Attributes:
        tokens: The generated token ids.
        loaded_tokens: Prompt tokens whose keys and values came from lmlive.
        computed_tokens: Prompt tokens that went through the model.
        stored_tokens: The prefix that lmlive holds afterwards.
        first_token_seconds: From the call to the first generated token.
    """

    tokens: list[int]
    loaded_tokens: int
    computed_tokens: int
    stored_tokens: int
    first_token_seconds: float


class PrefixEngine:
    """Greedy generation for one model, one sequence at a time, over prefixes shared through lmlive.

    Args:
        model: A decoder-only model in evaluation mode.
        paged: The cache whose ``kv_caches`` the worker registered.
        worker: A ``Worker`` of this process, or None to compute everything.
        scheduler: Looks prefixes up; None retrieves without a lease.
        prefill_tokens: The prompt is computed in steps that end at multiples of this many tokens; a run with lmlive
            and one without then see the same shapes, hence the same rounding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        paged: PagedCache,
        worker: Worker | None = None,
        scheduler: Scheduler | None = None,
        *,
        prefill_tokens: int = 2048,
    ) -> None:
        self._model = model
        self._paged = paged
        self._worker = worker
        self._scheduler = scheduler
        self._prefill_tokens = prefill_tokens
        self._doubtful: list[int] = []
        self._clock = MonotonicClock()
        # transformers renamed the argument in 5.24 and warns about the old name.
        names = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    async def generate(self, prompt: list[int], new_tokens: int, *, salt: str = "", store: bool = True) -> Generation:
        """Continue a prompt greedily by ``new_tokens`` tokens.

        Args:
            prompt: Token ids.
            new_tokens: How many to generate, at least 1.
            salt: Separates tenants: prefixes stored under one salt are not seen under another.
            store: Whether to store the prompt's new chunks once they are computed.

        Raises:
            InvalidArgument: Too few free blocks for the sequence.
        """
        begin = self._clock.now()
        self._free([])
        block_ids = self._paged.allocate(len(prompt) + new_tokens)
        try:
            loaded = await self._load(prompt, block_ids, salt)
            if loaded is None:
                # The server may still write into these blocks, so the prompt is computed into others.
                self._free(block_ids)
                block_ids, loaded = [], 0
                block_ids = self._paged.allocate(len(prompt) + new_tokens)
            sequence = PagedSequence(self._paged, block_ids, loaded_tokens=loaded)
            logits = self._prefill(sequence, prompt, loaded)
            tokens = [int(logits.argmax())]
            first_token_seconds = self._clock.now() - begin
            stored = await self._store(prompt, block_ids, salt) if store else 0
            while len(tokens) < new_tokens:
                tokens.append(int(self._forward(sequence, tokens[-1:]).argmax()))
        finally:
            self._free(block_ids)
        return Generation(tokens, loaded, len(prompt) - loaded, stored, first_token_seconds)

    async def _load(self, prompt: list[int], block_ids: list[int], salt: str) -> int | None:
        """Load what lmlive holds; None: the outcome is in doubt and the blocks are not ours yet."""
        if self._worker is None:
            return 0
        # The last prompt token is always computed: its logits are the first new token.
        wanted = prompt[: len(prompt) - 1]
        lease = None
        if self._scheduler is not None:
            found = await self._scheduler.lookup(wanted, salt=salt)
            if found.tokens == 0:
                return 0
            wanted, lease = wanted[: found.tokens], found.lease
        blocks = block_ids[: -(-len(wanted) // self._paged.block_tokens)]
        result = await self._worker.retrieve(wanted, blocks, salt=salt, lease=lease)
        return None if result.reason == "in_doubt" else result.tokens

    async def _store(self, prompt: list[int], block_ids: list[int], salt: str) -> int:
        if self._worker is None:
            return 0
        blocks = block_ids[: -(-len(prompt) // self._paged.block_tokens)]
        return (await self._worker.store(prompt, blocks, salt=salt)).tokens

    def _prefill(self, sequence: PagedSequence, prompt: list[int], begin: int) -> torch.Tensor:
        while True:
            end = min(len(prompt), (begin // self._prefill_tokens + 1) * self._prefill_tokens)
            logits = self._forward(sequence, prompt[begin:end])
            if end == len(prompt):
                return logits
            begin = end

    def _forward(self, sequence: PagedSequence, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **{self._cache_argument: sequence}
            )
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _free(self, block_ids: list[int]) -> None:
        """Give blocks back, these and earlier ones, except those that the server may still touch."""
        unsettled = set(self._worker.unsettled_blocks) if self._worker is not None else set()
        blocks = [*self._doubtful, *block_ids]
        self._doubtful = [block for block in blocks if block in unsettled]
        self._paged.free([block for block in blocks if block not in unsettled])
