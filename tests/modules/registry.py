"""Books whose lanes, timers and tethers are worked by hand: registrations without a loop."""

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import msgpack

from lmlive.cache.arena import Arena
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import ChunkStore
from lmlive.config import ServerConfig
from lmlive.errors import LMLiveError
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Roster
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.liveness.watch import Watch
from lmlive.modules.books import Books, Cancel
from lmlive.modules.call import Call, Connection
from lmlive.modules.entries import ContextEntry, Entries
from lmlive.modules.handler import Admit, Work
from lmlive.modules.management import hash_secret
from lmlive.modules.registration import admit_register
from lmlive.modules.tethers import FdTable, TetherRecord, Waiting, close_all
from lmlive.modules.unregistration import admit_unregister
from lmlive.protocol.codec import REQUEST, VERSION, Header
from lmlive.protocol.messages import FdHandle, Group, Handle, Plane, Register, Request, Unregister
from lmlive.testing.clock import ManualClock
from lmlive.testing.device import RecordingBackend

SECRET = b"s" * 16
OTHER = b"o" * 16
BLOCK, BLOCKS, RUN = 16, 8, 64
NBYTES = BLOCKS * RUN


class Asked:
    """One call: its answers, and its work where it has one."""

    def __init__(self, registry: "Registry", admit: Admit, message: Request, instance_id: int) -> None:
        self.answers: list[list[object] | BaseException] = []
        self.admit = admit
        header = Header(VERSION, REQUEST, int(message.verb), 1, 0, instance_id, 0, 0)
        said = Connection(1, SECRET, "test")
        self.call = Call(b"peer", header, registry.books.moment(), said, self._take, self._twice)
        self.call.message = message
        self.work: Work | None = None

    def start(self, books: Books) -> "Asked":
        try:
            self.work = self.admit(books, self.call)
        except LMLiveError as error:
            self.call.fail(error)
        return self

    @property
    def answer(self) -> list[object] | BaseException | None:
        assert len(self.answers) <= 1
        return self.answers[0] if self.answers else None

    def run(self) -> "Asked":
        """Do what lane and loop do."""
        assert self.work is not None
        result: object | None = None
        failure: BaseException | None = None
        try:
            result = self.work.run()
        except LMLiveError as error:
            failure = error
        self.work.settle(result, failure)
        return self

    def _take(self, call: Call, payload: list[object] | bytes | None, error: BaseException | None) -> None:
        del call
        unpacked: list[object] = msgpack.unpackb(payload) if isinstance(payload, bytes) else payload or []
        self.answers.append(error if error is not None else unpacked)

    def _twice(self, call: Call) -> None:
        raise AssertionError(f"answered twice: {call}")


class Registry:
    """A server's books, and hands to work them with."""

    def __init__(self, targets: Sequence[InstanceLivenessTarget] = (), **settings: Any) -> None:
        self.clock = ManualClock(100.0)
        self.backend = RecordingBackend()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.readmitted: list[Call] = []
        store = ChunkStore(Arena(1 << 20))
        numbers = count(1)
        policy = ReapPolicy(timeout=120.0, grace=3600.0, hold=600.0)
        self.books = Books(
            config=ServerConfig(environ={}, **settings),
            epoch=5,
            clock=self.clock,
            policy=policy,
            watch=Watch(1.0),
            roster=Roster(policy),
            entries=Entries(),
            backend=self.backend,
            store=store,
            leases=LeaseTable(store, seconds=60.0, token=lambda: f"lease-{next(numbers)}"),
            targets=targets,
            state="serving",
            later=self._later,
            readmit=self.readmitted.append,
            status=lambda: lambda: {"server": {"state": "serving"}},
            discard=close_all,
        )
        self.books.watch.advance(self.clock.now(), caught_up=True)

    # Workers

    def tether(
        self, files: int = 1, *, secret: bytes = SECRET, instance_id: int = 7, pid: int | None = 41
    ) -> TetherRecord:
        """Say that a worker's tether brought so many memory files."""
        table = FdTable(Waiting(close_all), uid=os.getuid(), received_at=self.clock.now())
        for _ in range(files):
            table.add(os.memfd_create("lmlive-test"))
        evidence = Evidence.NONE if pid is None else Evidence.PROCESS
        record = TetherRecord(hash_secret(secret), instance_id, 1, evidence, pid, table=table)
        self.books.tethers[record.secret_hash] = record
        return record

    def register(self, instance_id: int = 7, **changes: Any) -> Asked:
        return Asked(self, admit_register, register(**changes), instance_id).start(self.books)

    def unregister(self, instance_id: int = 7, secret: bytes = SECRET) -> Asked:
        return Asked(self, admit_unregister, Unregister(secret), instance_id).start(self.books)

    def registered(self, instance_id: int = 7, **changes: Any) -> ContextEntry:
        """Register with a cache, all the way."""
        self.tether(instance_id=instance_id, secret=changes.get("secret", SECRET))
        asked = self.register(instance_id, **changes).run()
        assert not isinstance(asked.answer, BaseException), asked.answer
        entry = self.books.entries.find(instance_id)
        assert entry is not None
        return entry

    # Hands

    def release_all(self) -> int:
        """Do the reaper's work."""
        released = 0
        while self.books.entries.releasable:
            entry = self.books.entries.releasable.popleft()
            if entry.context is not None:
                entry.context.close()
            self.books.entries.released(entry)
            released += 1
        return released

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.books.watch.advance(self.clock.now(), caught_up=True)
        due = [timer for timer in self.timers if timer[0] <= self.clock.now()]
        for timer in due:
            self.timers.remove(timer)
            timer[1]()

    def kinds(self) -> list[object]:
        """List the kinds of all events."""
        return [event["kind"] for event in self.books.events.after(0, 1000)]

    def _later(self, delay: float, callback: Callable[[], None]) -> Cancel:
        timer = (self.clock.now() + delay, callback)
        self.timers.append(timer)

        def cancel() -> None:
            if timer in self.timers:
                self.timers.remove(timer)

        return cancel


def register(**changes: Any) -> Register:
    """Give a REGISTER of one plane in descriptor 0."""
    plane = Plane(handle=0, offset=0, stride=RUN, run=RUN, in_block_shape=(BLOCK,), stride_order=(0,))
    known: dict[str, Any] = {
        "secret": SECRET,
        "model": "m",
        "revision": "",
        "rank": 0,
        "world_size": 1,
        "kv_dtype": "int32",
        "format": "",
        "mode": "server_driven",
        "strategy": "auto",
        "groups": (Group(BLOCK, BLOCKS, (plane,)),),
        "handles": (fd_handle(),),
    }
    return Register(**(known | changes))


def fd_handle(index: int = 0, nbytes: int = NBYTES) -> Handle:
    return FdHandle(index, nbytes)


BARE: dict[str, Any] = {"groups": (), "handles": (), "mode": "none", "kv_dtype": ""}
"""What makes a REGISTER one without a cache."""
