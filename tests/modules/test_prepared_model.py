"""Whatever happens to transfers that workers carry out: what they may touch is nobody else's, and all is given back."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmlive.modules.prepared import Prepared
from tests.modules.engine_bench import EngineBench, Refused, chunks_of
from tests.modules.kv_bench import CHUNK, CHUNK_BYTES, SECRET, Pending, Worker

POOL = 6
prompts = st.integers(0, 3).map(lambda at: range(1000 * at, 1000 * at + 3 * CHUNK))


@dataclass
class Open:
    """A transfer that its worker has not said to be over."""

    prepared: Prepared
    offsets: list[int]
    content: list[bytes] = field(default_factory=list)


class Transfers(RuleBasedStateMachine):
    """Two workers of one process, in and out, with the clock, CLEAR and copies of the server's own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = EngineBench(pool_chunks=POOL)
        self.workers: list[Worker] = []
        self.pending: list[tuple[Pending, Any]] = []
        self.open: dict[str, Open] = {}  # what somebody may still touch

    @property
    def prepared(self) -> dict[str, Prepared]:
        return self.bench.books.prepared._all

    def leases(self) -> list[str]:
        return sorted(self.prepared)

    @rule(instance=st.integers(1, 2), strategy=st.sampled_from(["shm", "inline"]), memory=st.binary(max_size=1))
    def register(self, instance: int, strategy: str, memory: bytes) -> None:
        found = self.bench.books.entries.find(instance)
        if found is not None and found.registration.fingerprint == memory + strategy.encode():
            return
        worker = self.bench.enroll(instance, strategy, fingerprint=memory + strategy.encode())
        self.workers = [one for one in self.workers if one.entry.live] + [worker]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), tokens=prompts, within=st.sampled_from([0.0, 1.0, 5.0]))
    def prepare(self, data: Any, tokens: range, within: float) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        ask = self.bench.prepare_store if data.draw(st.booleans()) else self.bench.prepare_retrieve
        try:
            reply = ask(worker, tokens, within=within)
        except Refused:
            return
        if reply.lease is None:
            return
        prepared = self.prepared[reply.lease]
        one = Open(prepared, self.bench.books.store.offsets(prepared.slots).tolist())
        self.open[reply.lease] = one
        if prepared.claim is None:
            one.content = [self.bytes_at(offset) for offset in one.offsets]
        elif prepared.shared:
            one.content = [bytes([(tokens[0] + chunk) % 251]) * CHUNK_BYTES for chunk in chunks_of(reply)]
            self.fill(one)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def write(self, data: Any) -> None:
        """Copy, as a worker may that does not know that its lease is dead."""
        one = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        if one.prepared.shared and one.prepared.claim is not None:
            self.fill(one)

    @precondition(lambda self: self.prepared)
    @rule(data=st.data(), commits=st.booleans())
    def end(self, data: Any, commits: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases()))
        prepared = self.prepared[lease]
        worker = Worker(prepared.entry, np.zeros(0, np.uint8))
        try:
            self.bench.commit(worker, lease) if commits else self.bench.release(lease)
        except Refused:
            if not prepared.over:  # it said nothing about this lease
                return
        self.open.pop(lease, None)

    @precondition(lambda self: self.prepared)
    @rule(data=st.data())
    def copy(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases()))
        prepared = self.prepared[lease]
        worker = Worker(prepared.entry, np.zeros(0, np.uint8))
        try:
            if prepared.claim is None:
                pending = self.bench.read(worker, lease, 0, prepared.nbytes)
            else:
                pending = self.bench.write(worker, lease, prepared.received, bytes(min(50, prepared.nbytes)))
        except Refused:
            return
        self.pending.append((pending, self.open[lease]))

    @precondition(lambda self: self.pending)
    @rule()
    def settle(self) -> None:
        pending, one = self.pending.pop(0)
        answer = pending.finish()
        if not isinstance(answer, BaseException) and one.prepared.claim is None:
            assert b"".join(map(bytes, pending.bulk)) == b"".join(one.content)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def reap(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.entry.live:
            self.bench.remove(worker)
            assert not any(one.entry is worker.entry and not one.shared for one in self.prepared.values())

    @rule(seconds=st.sampled_from([0.5, 2.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.bench.pass_time(seconds)

    @rule()
    def clear(self) -> None:
        self.bench.clear()

    @rule()
    def exit(self) -> None:
        for worker in self.workers:
            if worker.entry.live:
                self.bench.remove(worker)
        self.workers = []
        self.bench.books.end_owner(SECRET)
        self.open.clear()
        assert not self.prepared

    @invariant()
    def what_is_touched_is_what_it_was(self) -> None:
        for lease, one in self.open.items():
            if one.content and (one.prepared.shared or lease in self.prepared):
                assert [self.bytes_at(offset) for offset in one.offsets] == one.content

    @invariant()
    def what_is_written_is_nobody_elses(self) -> None:
        stores = [one for one in self.open.values() if one.prepared.claim is not None and one.prepared.shared]
        offsets = [offset for one in stores for offset in one.offsets]
        assert len(set(offsets)) == len(offsets)

    def bytes_at(self, offset: int) -> bytes:
        assert self.bench.books.pool is not None
        return bytes(self.bench.books.pool[offset : offset + CHUNK_BYTES])

    def fill(self, one: "Open") -> None:
        assert self.bench.books.pool is not None
        for offset, content in zip(one.offsets, one.content, strict=True):
            self.bench.books.pool[offset : offset + CHUNK_BYTES] = np.frombuffer(content, np.uint8)

    def teardown(self) -> None:
        self.exit()
        while self.pending:
            self.settle()
        assert self.bench.at_rest()


Transfers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTransfers = Transfers.TestCase
