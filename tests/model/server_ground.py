"""The ground on which a model's server stands: virtual time, lanes without threads, a record of what goes in and out.

Everything happens on one thread in one order, so that the same steps always do the same. Only what hangs has a thread.
"""

import asyncio
import os
import threading
import time
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from lmlive.device.backend import FdSource
from lmlive.errors import ServerDraining
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.modules.call import Source
from lmlive.modules.events import Event, EventLog
from lmlive.modules.handler import Lane, Work
from lmlive.protocol.codec import Header, decode_header
from lmlive.testing.clock import ManualClock
from lmlive.testing.device import RecordedMapping, RecordingBackend
from lmlive.testing.gate import Gate
from lmlive.testing.loop import VirtualLoop
from lmlive.testing.network import MemoryNetwork, MemoryRouter

T = TypeVar("T")

Outcome = tuple[object | None, BaseException | None]

Reader = tuple[Callable[..., object], tuple[Any, ...]]


class Seen(NamedTuple):
    """One thing that went into the server or came out of it."""

    kind: str
    at: float
    facts: tuple[Any, ...] = ()


class Trace(list[Seen]):
    """All of them, in order."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock

    def note(self, kind: str, *facts: object) -> None:
        self.append(Seen(kind, self.clock.now(), facts))


class GroundLoop(VirtualLoop):
    """Keeps descriptors without asking the kernel: a model says when one is ready."""

    def __init__(self, clock: ManualClock) -> None:
        self.readers: dict[int, Reader] = {}
        super().__init__(clock)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self.readers[fd] = (callback, args)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(_off_the_loop(self, func, *args))
        except Exception as error:  # noqa: BLE001 - whoever waits must know
            future.set_exception(error)
        return future

    async def come_to_rest(self) -> None:
        """Do all that is due now; time does not move."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        while True:
            await asyncio.sleep(0)
            if ready:
                continue
            if self.off_the_loop() > 0:
                _let_threads_run()
                continue
            timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            if not timers or timers[0].when() > self.time():
                return


def _let_threads_run() -> None:
    """Give way to a thread that is on its way to a gate, or to its end."""
    time.sleep(0)


class InlineLanes:
    """Stands in for ``lmlive.server.lanes.Lanes``: a work runs on the loop, or in a thread if it is going to hang."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        hangs: Callable[[Lane], bool],
        register_threads: int = 4,
        transfer_threads: int = 2,
        tier_threads: int = 4,
    ) -> None:
        self._loop = loop
        self._hangs = hangs
        self._limits = {
            Lane.REGISTER: register_threads,
            Lane.TRANSFER: transfer_threads,
            Lane.TIER: tier_threads,
            Lane.RELEASE: 16,
        }
        self._waiting: deque[Work] = deque()
        self._hung: dict[int, Work] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._woken = False
        self._changed = asyncio.Event()
        assert isinstance(loop, VirtualLoop)
        loop.stand_still_while(lambda: len(self._hung))

    def open(self) -> None:
        pass

    def submit(self, work: Work) -> None:
        self._waiting.append(work)
        self._wake()

    def stats(self) -> dict[str, dict[str, int]]:
        return {lane.value: {"threads": 0, "busy": 0, "queued": 0} for lane in Lane}

    async def close(self, deadline: float) -> list[Work]:
        self._closed = True
        self._wake()
        while self._waiting:
            self._changed.clear()
            await self._changed.wait()
        return list(self._hung.values())

    def join(self) -> None:
        """Wait for what hung, once nothing does any more."""
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        self._woken = False
        for work in list(self._waiting):
            busy = [hung for hung in self._hung.values() if hung.lane is work.lane]
            if self._closed and work.lane is not Lane.RELEASE:
                self._waiting.remove(work)
                work.settle(None, ServerDraining("the server is closing: this did not run"))
                continue
            full = len(busy) >= self._limits.get(work.lane, 1)
            if full or (work.key is not None and any(hung.key == work.key for hung in busy)):
                continue
            self._waiting.remove(work)
            if self._hangs(work.lane):
                self._hung[id(work)] = work
                thread = threading.Thread(target=self._run_apart, args=(work,), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                work.settle(*_off_the_loop(self._loop, _run, work))
        self._changed.set()

    def _run_apart(self, work: Work) -> None:
        self._outcomes[id(work)] = _run(work)
        self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        """Settle what has ended, in the order in which it began: which thread was first must mean nothing."""
        if len(self._outcomes) < len(self._hung) - Gate.waiting_anywhere():
            _let_threads_run()
            self._loop.call_soon(self._settle)
            return
        for number in [number for number in self._hung if number in self._outcomes]:
            self._hung.pop(number).settle(*self._outcomes.pop(number))
        self._wake()


def _off_the_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., T], *args: Any) -> T:
    """Call what otherwise runs in a thread: it may block, and finds no loop running."""
    _set_running_loop(None)
    try:
        return call(*args)
    finally:
        _set_running_loop(loop)


def _run(work: Work) -> Outcome:
    try:
        return work.run(), None
    except Exception as error:  # noqa: BLE001 - its settle must know
        return None, error


class TracedBackend(RecordingBackend):
    """Remembers whose memory each mapping is of."""

    def __init__(self) -> None:
        super().__init__()
        self.inodes: dict[int, int] = {}

    def open_handle(self, source: FdSource) -> RecordedMapping:
        inode = os.fstat(source.fd).st_ino
        mapping = super().open_handle(source)
        self.inodes[id(mapping)] = inode  # none is ever forgotten, so that each has an id of its own
        return mapping

    def open_inodes(self) -> list[int]:
        """Give the memory that is mapped now, as often as it is."""
        return [self.inodes[id(mapping)] for mapping in self.still_open]


class TracedRouter(MemoryRouter):
    """Writes down what is read and what is sent, and says over which connection it came."""

    trace: Trace
    connections_of: dict[bytes, int]

    def __init__(self, trace: Trace, network: MemoryNetwork, urls: Sequence[str], **settings: Any) -> None:
        take = settings.pop("on_message")

        def on_message(peer: bytes, frames: list[bytes]) -> None:
            number = self.connections_of.get(peer)
            self.source = None if number is None else Source(number, None)  # type: ignore[assignment]
            trace.note("frame", peer, frames[0])
            take(peer, frames)
            trace.note("taken")

        super().__init__(network, urls, on_message=on_message, **settings)
        self.trace = trace
        self.connections_of = {}

    def send(self, peer: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        self.trace.note("reply", peer, frames[0])
        return super().send(peer, frames)

    def send_all(self, replies: Iterable[tuple[bytes, bytes]]) -> None:
        for peer, frame in replies:
            self.send(peer, (frame,))

    def take_caught_up(self) -> bool:
        seen = super().take_caught_up()
        self.trace.note("tick", seen)
        return seen


class TracedEvents(EventLog):
    """Writes events down as they come."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def emit(self, kind: str, at: float, **facts: object) -> Event:
        event = super().emit(kind, at, **facts)
        self._trace.note("event", kind, event)
        return event


class Owner(InstanceLivenessTarget):
    """Keeps state of instances by the rules: a ping touches and never inserts, a drop drops."""

    def __init__(self, trace: Trace, is_detached: Callable[[int], bool]) -> None:
        self.stale: list[int] = []
        self._trace = trace
        self._is_detached = is_detached

    def touch_instance(self, instance_id: int) -> None:
        self._trace.note("told", instance_id)

    def reap_stale_instances(self, reap_timeout_s: float, registration_grace_s: float) -> list[int]:
        stale, self.stale = self.stale, []
        self._trace.note("scan", tuple(stale))
        return stale

    def drop_instance_state(self, instance_id: int) -> None:
        self._trace.note("drop", "owner", instance_id, self._is_detached(instance_id))


class Faulty(InstanceLivenessTarget):
    """Raises whatever it is asked."""

    def touch_instance(self, instance_id: int) -> None:
        raise RuntimeError("a target that cannot be touched")

    def reap_stale_instances(self, reap_timeout_s: float, registration_grace_s: float) -> list[int]:
        raise RuntimeError("a target that cannot be asked")

    def drop_instance_state(self, instance_id: int) -> None:
        raise RuntimeError("a target that drops nothing")


class Mirror(InstanceLivenessTarget):
    """Stands behind the faulty one, and must be told all the same."""

    def __init__(self, trace: Trace, is_detached: Callable[[int], bool]) -> None:
        self._trace = trace
        self._is_detached = is_detached

    def drop_instance_state(self, instance_id: int) -> None:
        self._trace.note("drop", "mirror", instance_id, self._is_detached(instance_id))


def header_of(frame: bytes) -> Header:
    return decode_header(frame)
