"""A bench whose workers copy by themselves: to and from slots, or with bytes behind their messages."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmlive.cache.keys import Namespace
from lmlive.errors import LMLiveError
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.roster import Facts
from lmlive.modules.call import Call
from lmlive.modules.engine_driven import admit_commit_store, admit_prepare_retrieve, admit_prepare_store
from lmlive.modules.entries import ContextEntry
from lmlive.modules.handler import Admit
from lmlive.modules.inline import admit_read, admit_write
from lmlive.modules.removal import remove
from lmlive.modules.tethers import FdTable, TetherRecord, Waiting, close_all
from lmlive.protocol.messages import CommitStore, PreparedReply, PrepareRetrieve, PrepareStore, Read, Request, Write
from tests.modules.kv_bench import CHUNK_BYTES, SECRET, Bench, Pending, Worker, keys_of, plain_layout

PROMPT = range(100, 124)  # three chunks


class Refused(Exception):
    """A request that was refused; ``error`` says why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


class EngineBench(Bench):
    """Books with workers that copy by themselves."""

    def pass_time(self, seconds: float) -> None:
        """Let time pass, which the server watches, and what is due by then happen."""
        watch = self.books.watch
        watch.advance(self.clock.now(), caught_up=True)
        watch.advance(self.clock.advance(seconds), caught_up=True)
        self.books.sweep()

    def enroll(self, instance_id: int = 1, strategy: str = "shm", *, fingerprint: bytes = b"") -> Worker:
        """Register one."""
        facts = Facts(
            instance_id=instance_id, secret_hash=SECRET, fingerprint=fingerprint, model="m", rank=0, world_size=1
        )
        registered = self.books.roster.register(facts, self.books.moment())
        if registered.removal is not None:
            remove(self.books, registered.removal)
        layout = plain_layout()
        entry = ContextEntry(registered.registration)
        entry.layout, entry.strategy = layout, strategy
        entry.namespace = Namespace("m", "", layout.layout_key, 0, 1)
        self.books.entries.install(entry)
        self.books.tethers[SECRET] = TetherRecord(
            SECRET, instance_id, 1, Evidence.PROCESS, 42, FdTable(Waiting(close_all)), has_pool=True
        )
        return Worker(entry, np.zeros(0, np.uint8))

    def prepare_store(
        self, worker: Worker, tokens: Sequence[int] = PROMPT, *, skip: int = 0, within: float = 0.0
    ) -> PreparedReply:
        message = PrepareStore(keys_of(tokens), skip, bytes(16))
        return _reply(self.ask(admit_prepare_store, message, worker, within))

    def prepare_retrieve(
        self,
        worker: Worker,
        tokens: Sequence[int] = PROMPT,
        *,
        skip: int = 0,
        lease: str | None = None,
        within: float = 0.0,
    ) -> PreparedReply:
        message = PrepareRetrieve(keys_of(tokens), skip, lease)
        return _reply(self.ask(admit_prepare_retrieve, message, worker, within))

    def commit(
        self, worker: Worker, lease: str | None, checksums: bytes | None = None, *, within: float = 0.0
    ) -> list[object]:
        return result(self.ask(admit_commit_store, CommitStore(str(lease), checksums), worker, within))

    def write(self, worker: Worker, lease: str | None, position: int, *bulk: bytes) -> Pending:
        return self.ask(admit_write, Write(str(lease), position), worker, bulk=bulk)

    def read(self, worker: Worker, lease: str | None, position: int, nbytes: int) -> Pending:
        return self.ask(admit_read, Read(str(lease), position, nbytes), worker)

    def slot(self, reply: PreparedReply, number: int) -> Any:
        """Give the memory of a slot, as a worker that has the pool mapped sees it."""
        offset = int(np.frombuffer(reply.offsets, "<u8")[number])
        assert self.books.pool is not None
        return self.books.pool[offset : offset + reply.chunk_bytes]

    def fill(self, reply: PreparedReply) -> None:
        """Write each slot full of the number of its chunk, from 1."""
        for number, chunk in enumerate(chunks_of(reply)):
            self.slot(reply, number)[:] = chunk + 1

    def stored(self, worker: Worker, tokens: Sequence[int] = PROMPT) -> None:
        """Have a prompt stored."""
        prepared = self.prepare_store(worker, tokens)
        self.fill(prepared)
        self.commit(worker, prepared.lease)

    def ask(
        self,
        admit: Admit,
        message: Request,
        worker: Worker,
        within: float = 0.0,
        *,
        bulk: Sequence[bytes] = (),
    ) -> Pending:
        def begin(books: Any, call: Call) -> Any:
            call.bulk = bulk
            return admit(books, call)

        try:
            return self._ask(begin, message, worker, within)
        except LMLiveError as error:
            raise Refused(error) from error


def chunks_of(reply: PreparedReply) -> list[int]:
    """Give which chunks of the prompt have slots."""
    chunks: list[int] = np.frombuffer(reply.chunks, "<u4").tolist()
    return chunks


def result(pending: Pending) -> list[object]:
    """Have a request done, and give its result."""
    answer = pending.finish()
    if isinstance(answer, BaseException):
        raise Refused(answer)
    return answer


def error_of(ask: Callable[[], object]) -> BaseException:
    """Give why a request is refused."""
    try:
        ask()
    except Refused as refused:
        return refused.error
    raise AssertionError("it was not refused")


def _reply(pending: Pending) -> PreparedReply:
    reply = PreparedReply.from_payload(result(pending))
    assert reply.chunk_bytes == CHUNK_BYTES
    return reply
