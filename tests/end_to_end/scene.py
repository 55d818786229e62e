"""What the whole-system tests share: a server on real sockets, a device that can be held up, and caches of known bytes.

The server runs in the test's own process, with its real router, tether, lanes and host device. ``HeldHost`` is that
device with gates behind the question whether a slice may be copied: a thread that waits there is in the middle of a
copy, as far as everybody else can tell.
"""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lmlive
from lmlive.device.backend import Chunk, FdSource, Mapping, MayContinue, Placement
from lmlive.device.host import HostBackend, HostMapping
from lmlive.testing.gate import Gate
from tests.conftest import eventually
from tests.server.raw import Raw

CHUNK = 64
"""Tokens of a chunk in these tests."""
BLOCK = 16
"""Tokens of a block, where a test does not choose otherwise."""
PER_CHUNK = CHUNK // BLOCK

Blocks = Sequence[int]


class HeldHost(HostBackend):
    """The host device; its copies can be held up, and what it has mapped can be counted.

    Attributes:
        mapped: How many mappings are open.
        torn: Mappings that were closed while a copy went through them.
        slices: How many slices were copied, by "gather" and "scatter".
    """

    def __init__(self) -> None:
        super().__init__()
        self.mapped = 0
        self.torn = 0
        self.slices: Counter[str] = Counter()
        self._gates: dict[str, tuple[Gate, int]] = {}
        self._in_use: Counter[HostMapping] = Counter()
        self._lock = threading.Lock()

    def hold(self, copy: str, after: int = 0) -> Gate:
        """Hold up every "gather" or "scatter", from the slice after the next ``after`` ones."""
        gate = Gate()
        self._gates[copy] = gate, self.slices[copy] + after
        return gate

    def open_handle(self, source: FdSource) -> HostMapping:
        mapping = super().open_handle(source)
        with self._lock:
            self.mapped += 1
        return mapping

    def close_mapping(self, mapping: Mapping) -> None:
        assert isinstance(mapping, HostMapping)
        with self._lock:
            self.torn += bool(self._in_use[mapping])
            self.mapped -= 1
        super().close_mapping(mapping)

    def gather(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        return self._copy("gather", super().gather, placement, chunk, may_continue)

    def scatter(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        return self._copy("scatter", super().scatter, placement, chunk, may_continue)

    def _copy(
        self,
        name: str,
        copy: Callable[[Placement, Chunk, MayContinue], bool],
        placement: Placement,
        chunk: Chunk,
        may_continue: MayContinue,
    ) -> bool:
        def held() -> bool:
            if not may_continue():
                return False
            gate, after = self._gates.get(name, (None, 0))
            if gate is not None and self.slices[name] >= after:
                gate.pass_through()
            self.slices[name] += 1
            return True

        used = placement.mappings  # type: ignore[attr-defined]
        with self._lock:
            self._in_use.update(used)
        try:
            return copy(placement, chunk, held)
        finally:
            with self._lock:
                self._in_use.subtract(used)


@dataclass(slots=True)
class Scene:
    """A running server, and what a test looks at."""

    server: lmlive.LivenessServer
    host: HeldHost
    raw: Raw

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def epoch(self) -> int:
        return self.server.epoch

    @property
    def pool(self) -> dict[str, Any]:
        found = self.server.status().to_dict()["pool"]
        assert isinstance(found, dict)
        return found

    def states(self) -> list[tuple[int, str, int]]:
        """Give (generation, state, in_flight) of all that is listed."""
        listed = self.server.status().instances
        return [(instance.generation, instance.state, instance.in_flight) for instance in listed]

    async def quiet(self) -> None:
        """Wait until nothing is on its way, nothing waits to be released, and nothing is reserved or held back."""

        def still() -> bool:
            status = self.server.status()
            pool = status.pool
            return (
                not any(lane.busy or lane.queued for lane in status.lanes.values())
                and not (pool.reserved_chunks or pool.held_back_chunks)
                and not (status.releases.pending or status.releases.stuck)
                and all(instance.state == "active" and not instance.in_flight for instance in status.instances)
            )

        await eventually(still)


@asynccontextmanager
async def scene(run_dir: Path, *, drains: bool = True, **settings: Any) -> AsyncIterator[Scene]:
    """Run a server; at the end all mappings must be closed, and none of them under a copy.

    Args:
        run_dir: Its run directory.
        drains: Whether all that ran must have ended by itself.
        settings: Its settings.
    """
    host = HeldHost()
    known: dict[str, Any] = {"pool_bytes": "4MiB", "chunk_tokens": CHUNK} | settings
    config = lmlive.ServerConfig(run_dir=run_dir, **known)
    async with lmlive.LivenessServer(config, backend=host) as server, Raw(server.url) as raw:
        yield Scene(server, host, raw)
    assert (host.mapped, host.torn) == (0, 0)
    assert server.drained is drains


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Give token ids that no other seed gives."""
    found: list[int] = np.random.default_rng([seed, 7]).integers(0, 100_000, tokens).tolist()
    return found


@dataclass(slots=True)
class Cache:
    """A worker's KV caches.

    Args:
        groups: One dict of tensors for each KV group.
        block_tokens: Tokens of a block, for each group.
        axis: Which axis counts the blocks.
    """

    groups: list[dict[str, Any]]
    block_tokens: list[int] = field(default_factory=lambda: [BLOCK])
    axis: int = 0

    def worker(self, url: str, **settings: Any) -> lmlive.Worker:
        known: dict[str, Any] = {"model": "m", "block_axis": self.axis}
        sizes: Any = self.block_tokens if len(self.groups) > 1 else self.block_tokens[0]
        return lmlive.Worker(url, kv_caches=self.groups, block_tokens=sizes, **(known | settings))

    def fill(self, seed: int) -> "Cache":
        """Fill all with bytes that say where they are, and that no other seed gives."""
        for number, tensor in enumerate(self.tensors):
            rng = np.random.default_rng([seed, number])
            if isinstance(tensor, torch.Tensor):
                shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
                content = torch.from_numpy(rng.integers(1, 120, shape, dtype=np.uint8))
                tensor.copy_(content.view(tensor.dtype))
            else:
                tensor[...] = rng.standard_normal(tensor.shape)
        return self

    @property
    def tensors(self) -> list[Any]:
        return [tensor for group in self.groups for tensor in group.values()]

    def content(self, *blocks: Blocks) -> list[bytes]:
        """Give the bytes of blocks, which are named for each group, tensor by tensor."""
        given = blocks if len(blocks) == len(self.groups) else blocks * len(self.groups)
        return [
            _raw(tensor[(slice(None),) * self.axis + (list(ids),)])
            for group, ids in zip(self.groups, given, strict=True)
            for tensor in group.values()
        ]

    def all_but(self, *blocks: Blocks) -> list[bytes]:
        """Give the bytes of all other blocks."""
        given = blocks if len(blocks) == len(self.groups) else blocks * len(self.groups)
        others = []
        for group, ids in zip(self.groups, given, strict=True):
            count = next(iter(group.values())).shape[self.axis]
            others.append([block for block in range(count) if block not in set(ids)])
        return self.content(*others)


def plain(blocks: int = 64, *, heads: int = 2, dtype: str = "float32", seed: int | None = None) -> Cache:
    """Give a cache of one tensor, K and V stacked, in shared memory."""
    cache = Cache([{"kv": lmlive.shared_empty((2, blocks, BLOCK, heads, 8), dtype)}], axis=1)
    return cache if seed is None else cache.fill(seed)


PLAIN_CHUNK_BYTES = 2 * CHUNK * 2 * 8 * 4
"""Bytes of one chunk of ``plain()``."""


def _raw(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
    return bytes(np.ascontiguousarray(tensor).tobytes())
