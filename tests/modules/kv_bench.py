"""Books with real parts, a clock moved by hand, and workers whose memory is an array: verbs without a loop.

Nothing runs by itself: ``Bench.store`` and its like give a ``Pending`` whose work a test runs and settles when it says.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from lmlive.cache.arena import Arena
from lmlive.cache.keys import Namespace, chunk_keys
from lmlive.cache.layout import KVLayout
from lmlive.cache.leases import LeaseTable
from lmlive.cache.room import PASS_CHUNKS
from lmlive.cache.store import ChunkStore
from lmlive.config import ServerConfig
from lmlive.device.backend import FdSource, GroupPlace, PlanePlace
from lmlive.device.context import CacheContext
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Facts, Reason, Roster
from lmlive.liveness.watch import Watch
from lmlive.modules.books import Books
from lmlive.modules.call import Call, Connection
from lmlive.modules.entries import ContextEntry, Entries
from lmlive.modules.handler import Admit, Work
from lmlive.modules.lookup import admit_clear, admit_lookup, admit_release
from lmlive.modules.removal import remove
from lmlive.modules.server_driven import admit_retrieve, admit_store
from lmlive.modules.tethers import close_all
from lmlive.protocol.codec import REQUEST, VERSION, Header
from lmlive.protocol.messages import Clear, Lookup, Release, Request, Retrieve, Store
from lmlive.testing.clock import ManualClock
from lmlive.testing.device import RecordingBackend

CHUNK = 8  # tokens of a chunk
BLOCK = 4  # tokens of a block
RUN = 16  # bytes of a block in one plane
PLANES = 2
BLOCKS = 32
CHUNK_BYTES = CHUNK // BLOCK * RUN * PLANES
SECRET = b"secret"
Bytes = npt.NDArray[np.uint8]


def plain_layout(format: str = "", *, blocks: int = BLOCKS) -> KVLayout:  # noqa: A002 - the layout's own word
    """Give a layout of two planes in one handle."""
    plane = RUN * blocks
    planes = [(0, at * plane, RUN, RUN, (BLOCK,), (0,)) for at in range(PLANES)]
    return KVLayout.from_wire([(BLOCK, blocks, planes)], kv_dtype="int32", format=format, handle_bytes=[PLANES * plane])


def hybrid_layout() -> KVLayout:
    """Give a layout of two groups, the second with blocks as large as a chunk."""
    first = (BLOCK, BLOCKS, [(0, 0, RUN, RUN, (BLOCK,), (0,))])
    second = (CHUNK, 6, [(0, RUN * BLOCKS, 2 * RUN, 2 * RUN, (CHUNK,), (0,))])
    nbytes = RUN * BLOCKS + 6 * 2 * RUN
    return KVLayout.from_wire([first, second], kv_dtype="int32", format="", handle_bytes=[nbytes])


class Worker:
    """A registered instance and its memory."""

    def __init__(self, entry: ContextEntry, memory: Bytes) -> None:
        self.entry = entry
        self.memory = memory

    def fill(self) -> None:
        """Write bytes that differ from block to block."""
        self.memory[:] = np.arange(self.memory.size) * 7 % 251 + 1

    def block(self, block: int, plane: int = 0) -> bytes:
        start = plane * RUN * BLOCKS + block * RUN
        return self.memory[start : start + RUN].tobytes()

    def blocks(self, *blocks: int) -> list[bytes]:
        return [self.block(block, plane) for block in blocks for plane in range(PLANES)]


class Pending:
    """One request: its answer once there is one, and its work."""

    def __init__(self) -> None:
        self.answers: list[list[object] | BaseException] = []
        self.work: Work | None = None
        self.bulk: Sequence[bytes | memoryview] = ()

    def take(self, call: Call, payload: list[object] | bytes | None, error: BaseException | None) -> None:
        self.bulk = call.bulk
        assert not isinstance(payload, bytes)
        self.answers.append(error if payload is None and error is not None else payload or [])

    @property
    def answer(self) -> list[object] | BaseException:
        assert len(self.answers) == 1, self.answers
        return self.answers[0]

    def run(self) -> object:
        assert not self.answers
        assert self.work is not None
        return self.work.run()

    def settle(self, result: object = None, error: BaseException | None = None) -> list[object] | BaseException:
        assert self.work is not None
        self.work.settle(result, error)
        return self.answer

    def finish(self) -> list[object] | BaseException:
        """Do what the lane does."""
        if self.work is None:
            return self.answer
        return self.settle(self.run())


class Bench:
    """A server's books.

    Args:
        pool_chunks: How many chunks of ``plain_layout`` the pool holds.
        pass_chunks: How many chunks one pass frees.
        **settings: Of ``ServerConfig``.
    """

    def __init__(self, pool_chunks: int = 16, *, pass_chunks: int = PASS_CHUNKS, **settings: Any) -> None:
        self.clock = ManualClock(100.0)
        self.backend = RecordingBackend()
        self.timers: list[Callable[[], None]] = []
        store = ChunkStore(Arena(pool_chunks * CHUNK_BYTES), pass_chunks=pass_chunks)
        tokens = count(1)
        self.config = ServerConfig(chunk_tokens=CHUNK, environ={}, **settings)
        policy = ReapPolicy(timeout=120.0, grace=3600.0, hold=0.0)
        self.books = Books(
            config=self.config,
            epoch=5,
            clock=self.clock,
            policy=policy,
            watch=Watch(policy.scan_interval),
            roster=Roster(policy),
            entries=Entries(),
            backend=self.backend,
            store=store,
            leases=LeaseTable(store, seconds=60.0, token=lambda: f"lease-{next(tokens)}"),
            pool=np.zeros(store.nbytes, np.uint8),
            state="serving",
            later=self._later,
            readmit=_never,
            status=lambda: dict,
            discard=close_all,
        )

    def _later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        assert not seconds
        self.timers.append(call)
        return self.timers.clear

    # Workers

    def register(
        self,
        instance_id: int = 1,
        *,
        rank: int = 0,
        world_size: int = 1,
        layout: KVLayout | None = None,
        with_cache: bool = True,
        fingerprint: bytes = b"",
    ) -> Worker:
        facts = Facts(
            instance_id=instance_id,
            secret_hash=SECRET,
            fingerprint=fingerprint,
            model="m",
            rank=rank,
            world_size=world_size,
        )
        registered = self.books.roster.register(facts, self.books.moment())
        if registered.removal is not None:
            remove(self.books, registered.removal)
        entry = ContextEntry(registered.registration)
        memory = np.zeros(0, np.uint8)
        if with_cache:
            layout = layout or plain_layout()
            nbytes = max(
                plane.offset + group.num_blocks * plane.stride for group in layout.groups for plane in group.planes
            )
            places = [
                GroupPlace(
                    group.num_blocks,
                    tuple(PlanePlace(plane.handle, plane.offset, plane.stride, plane.run) for plane in group.planes),
                )
                for group in layout.groups
            ]
            entry.context = CacheContext.open(self.backend, [FdSource(-1, nbytes, 0)], places)
            entry.layout = layout
            entry.namespace = Namespace("m", "", layout.layout_key, rank, world_size)
            memory = self.backend.mappings[-1].memory
        self.books.entries.install(entry)
        worker = Worker(entry, memory)
        worker.fill()
        return worker

    def remove(self, worker: Worker) -> None:
        """Reap it."""
        removal = self.books.roster.reap(worker.entry.instance_id, None, Reason.REQUESTED, self.books.moment())
        assert removal is not None
        remove(self.books, removal)

    # Verbs

    def store(
        self, worker: Worker, tokens: Sequence[int], *blocks: Sequence[int], skip: int = 0, within: float = 0.0
    ) -> Pending:
        message = Store(keys_of(tokens), tuple(map(packed, blocks)), skip, bytes(16))
        return self._ask(admit_store, message, worker, within)

    def retrieve(
        self,
        worker: Worker,
        tokens: Sequence[int],
        *blocks: Sequence[int],
        skip: int = 0,
        lease: str | None = None,
        within: float = 0.0,
    ) -> Pending:
        message = Retrieve(keys_of(tokens), tuple(map(packed, blocks)), skip, lease)
        return self._ask(admit_retrieve, message, worker, within)

    def look_up(
        self, tokens: Sequence[int], *, world_size: int = 1, lease: str | None = None, model: str = "m"
    ) -> list[Any]:
        answer = self._ask(admit_lookup, Lookup(model, "", world_size, keys_of(tokens), lease)).answer
        assert isinstance(answer, list)
        return answer

    def release(self, lease: str) -> list[object] | BaseException:
        return self._ask(admit_release, Release(lease)).answer

    def clear(self, model: str | None = None) -> list[object] | BaseException:
        return self._ask(admit_clear, Clear(model)).answer

    def _ask(self, admit: Admit, message: Request, worker: Worker | None = None, within: float = 0.0) -> Pending:
        deadline = self.clock.now_ns() + round(within * 1e9) if within else 0
        instance_id, generation = (worker.entry.instance_id, worker.entry.generation) if worker else (0, 0)
        header = Header(VERSION, REQUEST, int(message.verb), 1, self.books.epoch, instance_id, generation, deadline)
        pending = Pending()
        connection = Connection(1, SECRET, "test")
        call = Call(b"peer", header, self.books.moment(), connection=connection, answer=pending.take, twice=_never)
        call.message = message
        pending.work = admit(self.books, call)
        assert call.deferred or (pending.work is None) == bool(pending.answers)
        return pending

    # Looking

    def at_rest(self) -> bool:
        """Tell whether nothing is pinned, reserved or borrowed."""
        store = self.books.store
        busy = any(entry.in_flight for entry in self.books.entries)
        stuck = store.reserved_chunks or store.held_back_chunks or store.leased_chunks
        store.clear()
        return not busy and not stuck and store.used_bytes == 0


def keys_of(tokens: Sequence[int]) -> bytes:
    return b"".join(chunk_keys(tokens, chunk_tokens=CHUNK))


def packed(blocks: Sequence[int]) -> bytes:
    return np.array(blocks, dtype="<u4").tobytes()


def _never(call: Call) -> None:
    raise AssertionError(f"not in these tests: {call}")


def _never_discard(descriptors: Sequence[int]) -> None:
    raise AssertionError(f"not in these tests: {descriptors}")
