"""The threads of one lane, and the queue that they share.

Not the lanes: which works go where, and how they settle, is ``lanes``. The rule it keeps: a thread that hangs keeps
its place and nothing else, so that the others go on.

Any thread may call what is here, the loop's among them; no lock is held while anything runs.
"""

import threading
from collections.abc import Callable

from lmlive.errors import StartError
from lmlive.modules.handler import Work
from lmlive.server.fair import FairQueue

Post = Callable[[Work, object | None, BaseException | None], None]
"""Takes the outcome of a work; any thread may call it."""


class Pool:
    """The threads of one lane, started when they are needed.

    Args:
        name: Of the lane; its threads carry it.
        limit: Threads at most.
        idle_seconds: How long idle threads wait for more before they end; None: until the pool is closed.
        post: Gets each outcome, in the lane's thread.
        on_exit: Gets the pool when one of its threads ends, in that thread, as its last act.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        idle_seconds: float | None,
        post: Post,
        on_exit: Callable[["Pool", threading.Thread], None],
    ) -> None:
        self._name = name
        self._limit = limit
        self._idle_seconds = idle_seconds
        self.alive: set[threading.Thread] = set()
        """Threads that were not joined yet; the loop's."""
        self._post = post
        self._on_exit = on_exit
        # The loop holds this lock for a few dictionary operations, never while anything runs.
        self._changed = threading.Condition(threading.Lock())
        self._queue = FairQueue()
        self._running: dict[int, Work] = {}
        self._threads = 0
        self._started = 0
        self._idle = 0
        self._called = 0
        self._closing = False

    @property
    def waiting(self) -> int:
        """How many works wait, as of a moment ago."""
        return len(self._queue)

    def start(self) -> None:
        """Start one thread now, whether there is work or not.

        Raises:
            StartError: The system gives none.
        """
        with self._changed:
            name = self._next_name()
        thread = self._start(name)
        if thread not in self.alive:
            raise StartError("no thread to be had: raise the limit of processes (ulimit -u)")

    def submit(self, work: Work) -> bool:
        """Queue a work; False if the pool is closed."""
        with self._changed:
            if self._closing:
                return False
            self._queue.push(work)
            if not self._queue.ready:
                return True  # behind a running work of its key, whose thread takes it next
            if self._idle > self._called:
                self._called += 1
                self._changed.notify()
                return True
            if self._threads == self._limit:
                return True
            name = self._next_name()
        self._start(name)
        return True

    def relieve(self) -> None:
        """Start more threads for what waits, as many as the pool has at most: those that it has hang."""
        with self._changed:
            names = [self._next_name() for _ in range(min(len(self._queue), self._limit))]
        for name in names:
            self._start(name)

    def stats(self) -> dict[str, int]:
        """Count threads, running works and waiting works."""
        with self._changed:
            return {"threads": self._threads, "busy": len(self._running), "queued": len(self._queue)}

    def running(self) -> list[Work]:
        """List what runs now."""
        with self._changed:
            return list(self._running.values())

    def quiet(self) -> bool:
        """Tell whether nothing runs or waits."""
        with self._changed:
            return not self._running and not len(self._queue)

    def close(self) -> list[Work]:
        """Take nothing more and let idle threads end; gives the works that will not run."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._queue.clear()

    def _next_name(self) -> str:
        """Count a thread that is about to be started, and name it; the lock is held."""
        self._threads += 1
        self._started += 1
        return f"lmlive-{self._name}-{self._started}"

    def _start(self, name: str) -> threading.Thread:
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.alive.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            self._without_thread(thread, error)
        return thread

    def _without_thread(self, thread: threading.Thread, error: RuntimeError) -> None:
        """A thread could not be started: the others will do, and without any nothing here can run."""
        self.alive.discard(thread)
        with self._changed:
            self._threads -= 1
            left = [] if self._threads else self._queue.clear()
        for work in left:
            self._post(work, None, error)

    def _serve(self) -> None:
        """A thread of the pool."""
        while (work := self._next()) is not None:
            result: object | None = None
            failure: BaseException | None = None
            try:
                result = work.run()
            except BaseException as error:  # noqa: BLE001 - whatever it was, its settle must run
                failure = error
            with self._changed:
                del self._running[id(work)]
                self._queue.done(work)
            self._post(work, result, failure)
            del work, result, failure  # an idle thread keeps nothing alive
        self._on_exit(self, threading.current_thread())

    def _next(self) -> Work | None:
        """Take the next work, or wait for it; None: the thread ends."""
        over = False
        with self._changed:
            while True:
                work = self._queue.pop()
                if work is not None:
                    self._running[id(work)] = work
                    return work
                if self._closing or over:
                    self._threads -= 1
                    return None
                self._idle += 1
                self._changed.wait(self._idle_seconds)
                self._idle -= 1
                # A call may come just as a wait times out, so it is not for whom it wakes but for who takes it first.
                over = not self._called and self._idle_seconds is not None
                self._called -= not over and self._called > 0
