"""``BlockingWorker`` and ``BlockingScheduler``: for engines whose hooks are synchronous.

Each is the asynchronous one, on an event loop in a daemon thread of its own; arguments and results are the same. Any
thread may call, several at once. No call outlasts its deadline by more than a quarter of a second, even if that thread
is stuck or gone: it is over then, with the result of a call that got no answer. A retrieve that was left so, or whose
caller was interrupted, keeps its blocks in ``unsettled_blocks`` until nobody can write into them any more.
"""

import atexit
import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from lmlive.config import WorkerConfig
from lmlive.errors import RequestTimeout
from lmlive.protocol.verbs import Verb
from lmlive.worker.flight import GRACE
from lmlive.worker.hosted import Host, HostedScheduler, HostedWorker
from lmlive.worker.private import CLOCK, Call
from lmlive.worker.results import BlockId, LookupResult, RetrieveResult, Settled, StoreResult

EXIT_SECONDS: Final = 1.0
"""How long the end of the interpreter waits for what was not closed, all in all."""

T = TypeVar("T")

_hosts: "weakref.WeakSet[Host]" = weakref.WeakSet()


class _Blocking:
    """What both have in common: a host, entered and closed."""

    _host: Host

    def _settle_in(self, host: Host) -> None:
        self._host = host
        _hosts.add(host)
        weakref.finalize(self, host.abandon).atexit = False  # at exit all are closed together

    def __enter__(self) -> Self:
        self._host.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End calls on their way by their deadlines, then leave the server; idempotent, any thread.

        With a server that does not answer it takes a second. In a forked child it does nothing.
        """
        self._host.close()


class BlockingWorker(_Blocking):
    """A ``Worker`` for synchronous code; its arguments are that one's, and what its calls answer too.

    **Lifecycle**: ``with``, once. What was not closed is closed when it is collected, or when the interpreter ends,
    which waits for a second at most.

    **Concurrency**: any thread, several at once. In a thread that runs an event loop its calls hold that loop while
    they wait; the first one says so with a WARNING. A forked child gets ``ForkedProcess``.

    A ``KeyboardInterrupt`` ends the waiting, not the call: its blocks stay in ``unsettled_blocks`` until it is over.
    """

    def __init__(
        self,
        url: str,
        *,
        kv_caches: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        block_tokens: int | Sequence[int] = 16,
        model: str,
        block_axis: int | Mapping[str, int] = 0,
        revision: str = "",
        format: str = "",  # noqa: A002 - the public name
        rank: int = 0,
        world_size: int = 1,
        config: WorkerConfig | None = None,
    ) -> None:
        self._config = config or WorkerConfig()
        self._worker = HostedWorker(
            url,
            kv_caches=kv_caches,
            block_tokens=block_tokens,
            model=model,
            block_axis=block_axis,
            revision=revision,
            format=format,
            rank=rank,
            world_size=world_size,
            config=self._config,
        )
        self._settle_in(Host("worker", self._worker, self._config.request_timeout))

    def __repr__(self) -> str:
        """Tell who it is and how it is."""
        return repr(self._worker).replace("<Worker", "<BlockingWorker", 1)

    # facts

    @property
    def instance_id(self) -> int:
        """The random number by which the server knows this worker."""
        return self._worker.instance_id

    @property
    def generation(self) -> int:
        """The server's number for the present registration; 0 before the first one."""
        return self._worker.generation

    @property
    def healthy(self) -> bool:
        """Whether the server answers and knows this worker; False makes stores drops and retrieves misses."""
        return self._worker.healthy

    @property
    def unsettled_blocks(self) -> frozenset[BlockId]:
        """Blocks that the server may write into, now or later; those of interrupted calls too."""
        on_their_way = frozenset().union(*tuple(self._host.calls.values()))
        return on_their_way | self._worker.unsettled_blocks  # in this order: a call that ends leaves its doubts there

    def stats(self) -> dict[str, int]:
        """Count what happened so far, by name; names that never happened are absent."""
        return self._worker.stats()

    # calls

    def store(
        self,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: int = 0,
        adapter: str = "",
        salt: str = "",
        deadline: float | None = None,
    ) -> StoreResult:
        """Store the whole chunks of a prompt; as ``Worker.store``."""
        return self.submit_store(
            token_ids, block_ids, skip_tokens=skip_tokens, adapter=adapter, salt=salt, deadline=deadline
        ).result()

    def retrieve(
        self,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: int = 0,
        adapter: str = "",
        salt: str = "",
        deadline: float | None = None,
        lease: str | None = None,
    ) -> RetrieveResult:
        """Load the longest stored prefix of a prompt; as ``Worker.retrieve``.

        ``result.settled.wait(timeout)`` waits for what is in doubt.
        """
        return self.submit_retrieve(
            token_ids, block_ids, skip_tokens=skip_tokens, adapter=adapter, salt=salt, deadline=deadline, lease=lease
        ).result()

    def submit_store(
        self,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: int = 0,
        adapter: str = "",
        salt: str = "",
        deadline: float | None = None,
    ) -> Future[StoreResult]:
        """Begin a store, and do not wait: tokens and blocks must stay as they are until the future is done.

        The future is done a quarter of a second after the deadline at the latest, and cannot be cancelled.
        """
        self._host.check()
        order = self._worker.order(
            Verb.STORE,
            token_ids,
            block_ids,
            skip_tokens=skip_tokens,
            adapter=adapter,
            salt=salt,
            deadline=deadline,
        )

        call = Call(order.deadline + GRACE, _late(StoreResult(0, 0, "timeout"), self._config))
        self._host.start(call, functools.partial(self._worker.run_store, order))
        return call

    def submit_retrieve(
        self,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: int = 0,
        adapter: str = "",
        salt: str = "",
        deadline: float | None = None,
        lease: str | None = None,
    ) -> Future[RetrieveResult]:
        """Begin a retrieve, and do not wait: its blocks are not to be touched before the future is done.

        The future is done a quarter of a second after the deadline at the latest, and cannot be cancelled.
        """
        self._host.check()
        order = self._worker.order(
            Verb.RETRIEVE,
            token_ids,
            block_ids,
            skip_tokens=skip_tokens,
            adapter=adapter,
            salt=salt,
            deadline=deadline,
            lease=lease,
        )
        asked, settled = order.blocks.asked(self._worker.chunk_tokens), Settled()
        call = Call(order.deadline + GRACE, _late(RetrieveResult(0, asked, "in_doubt", settled), self._config))
        work = functools.partial(self._worker.run_retrieve, order, settled)
        self._host.start(call, work, blocks=frozenset(asked))
        return call

    def ping(self) -> bool:
        """Ask the server for an answer, as a sign of life; True.

        Raises:
            RequestTimeout: None came within ``heartbeat_timeout``.
            ServerUnavailable: Nobody serves at this address.
        """
        call: Call[bool] = Call(CLOCK.now() + self._config.heartbeat_timeout + GRACE, _no_answer)
        self._host.start(call, self._worker.ping)
        return call.result()


class BlockingScheduler(_Blocking):
    """A ``Scheduler`` for synchronous code; its arguments are that one's, and what its calls answer too.

    **Lifecycle** and **concurrency**: as of ``BlockingWorker``.
    """

    def __init__(
        self, url: str, *, model: str, revision: str = "", world_size: int = 1, config: WorkerConfig | None = None
    ) -> None:
        self._config = config or WorkerConfig()
        self._scheduler = HostedScheduler(
            url, model=model, revision=revision, world_size=world_size, config=self._config
        )
        self._settle_in(Host("scheduler", self._scheduler, self._config.request_timeout))

    def __repr__(self) -> str:
        """Tell whether it has a server."""
        return repr(self._scheduler).replace("<Scheduler", "<BlockingScheduler", 1)

    @property
    def healthy(self) -> bool:
        """Whether a server answered HELLO and is not known to be gone."""
        return self._scheduler.healthy

    def stats(self) -> dict[str, int]:
        """Count what happened so far, by name; names that never happened are absent."""
        return self._scheduler.stats()

    def lookup(self, token_ids: Any, *, adapter: str = "", salt: str = "", lease: str | None = None) -> LookupResult:
        """Ask how long a prefix every rank can load, and lease it; as ``Scheduler.lookup``."""
        scheduler = self._scheduler

        async def give_back(found: LookupResult) -> None:
            if found.lease != lease:
                await scheduler.release(found.lease)

        call = Call(self._due(), _late(LookupResult(0, None, "timeout"), self._config))
        work = functools.partial(scheduler.lookup, token_ids, adapter=adapter, salt=salt, lease=lease)
        self._host.start(call, work, undo=give_back)
        return call.result()

    def release(self, lease: str | None) -> bool:
        """End a lease; as ``Scheduler.release``."""
        call = Call(self._due(), lambda: False)
        self._host.start(call, functools.partial(self._scheduler.release, lease))
        return call.result()

    def _due(self) -> float:
        return CLOCK.now() + self._config.lookup_timeout + GRACE


def _late(result: T, config: WorkerConfig) -> Callable[[], T]:
    """Make what gives the result of a call that got none in time, or with ``strict`` raises it."""

    def late() -> T:
        if config.strict:
            raise RequestTimeout("no answer before the deadline", result=result)
        return result

    return late


def _no_answer() -> bool:
    raise RequestTimeout("no answer to the PING")


def _close_all() -> None:
    """Close what was not closed before the interpreter ends, for a moment at most."""
    closing = [closed for closed in [host.begin_close() for host in list(_hosts)] if closed is not None]
    end = CLOCK.now() + EXIT_SECONDS
    for closed in closing:
        with contextlib.suppress(TimeoutError):
            closed.result(max(0.0, end - CLOCK.now()))


atexit.register(_close_all)
