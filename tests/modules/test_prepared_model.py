"""Whatever happens to transfers that workers carry out: what they may touch is nobody else's, and all is given back."""

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


class Transfers(RuleBasedStateMachine):
    """Two workers of one process, in and out, with the clock, CLEAR and copies of the server's own in between."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = EngineBench(pool_chunks=POOL)
        self.workers: list[Worker] = []
        self.pending: list[tuple[Pending, Any]] = []
        self.contents: dict[str, list[bytes]] = {}  # what a load must find in its slots

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
        if prepared.claim is None:
            self.contents[reply.lease] = [self.slot(prepared, at) for at in range(prepared.slots.size)]
        elif reply.offsets:
            for at, chunk in enumerate(chunks_of(reply)):
                self.bench.slot(reply, at)[:] = (tokens[0] + chunk) % 251

    @precondition(lambda self: self.prepared)
    @rule(data=st.data())
    def write_late(self, data: Any) -> None:
        """Copy, as a worker may that does not know that its lease is dead."""
        prepared = self.prepared[data.draw(st.sampled_from(self.leases()))]
        if prepared.shared and prepared.claim is not None:
            offsets = self.bench.books.store.offsets(prepared.slots)
            assert self.bench.books.pool is not None
            for offset in offsets.tolist():
                self.bench.books.pool[offset : offset + CHUNK_BYTES] = 255

    @precondition(lambda self: self.prepared)
    @rule(data=st.data(), commits=st.booleans())
    def end(self, data: Any, commits: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases()))
        worker = Worker(self.prepared[lease].entry, np.zeros(0, np.uint8))
        try:
            self.bench.commit(worker, lease) if commits else self.bench.release(lease)
        except Refused:
            return

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
        self.pending.append((pending, lease))

    @precondition(lambda self: self.pending)
    @rule()
    def settle(self) -> None:
        pending, lease = self.pending.pop(0)
        answer = pending.finish()
        if not isinstance(answer, BaseException) and lease in self.contents:
            assert b"".join(map(bytes, pending.bulk)) == b"".join(self.contents[lease])

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def reap(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.entry.live:
            self.bench.remove(worker)

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
        assert not self.prepared

    @invariant()
    def what_is_read_is_what_it_was(self) -> None:
        for lease, content in self.contents.items():
            if lease in self.prepared:
                prepared = self.prepared[lease]
                assert [self.slot(prepared, at) for at in range(prepared.slots.size)] == content

    @invariant()
    def what_is_written_is_nobody_elses(self) -> None:
        written = [prepared.slots for prepared in self.prepared.values() if prepared.claim is not None]
        rows = np.concatenate(written) if written else np.zeros(0, np.intp)
        assert np.unique(rows).size == rows.size
        held = self.bench.books.store
        assert held.reserved_chunks + held.held_back_chunks >= rows.size

    def slot(self, prepared: Prepared, at: int) -> bytes:
        offset = int(self.bench.books.store.offsets(prepared.slots)[at])
        assert self.bench.books.pool is not None
        return bytes(self.bench.books.pool[offset : offset + CHUNK_BYTES])

    def teardown(self) -> None:
        self.exit()
        while self.pending:
            self.settle()
        assert self.bench.at_rest()


Transfers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTransfers = Transfers.TestCase
