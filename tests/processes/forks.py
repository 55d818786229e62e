"""A process that forks while it has workers and schedulers open, and looks at what that does to it.

``python -m tests.processes.forks URL SCENARIO`` prints "fine" if all is as it should be.
"""

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import lmlive
from lmlive.errors import ForkedProcess
from lmlive.worker.blocking import BlockingScheduler, BlockingWorker

PROMPT = list(range(1000, 1600))
IDS = list(range(38))
CONFIG = lmlive.WorkerConfig(heartbeat_interval=0.05, heartbeat_start="register", lookup_timeout=5.0)


def cache() -> dict[str, Any]:
    return {"layer": lmlive.shared_empty((64, 16, 8), np.float32)}


def blocking(url: str) -> tuple[BlockingWorker, BlockingScheduler]:
    return (
        BlockingWorker(url, kv_caches=cache(), block_tokens=16, model="m", config=CONFIG),
        BlockingScheduler(url, model="m", config=CONFIG),
    )


def fork(inside: Callable[[], None]) -> int:
    """Run something in a child that exits as Python does, and give its wait status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # whatever hangs is a failure
        inside()
        sys.exit(0)
    return ended(pid)


def ended(pid: int) -> int:
    """Wait for a child, and give its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(*calls: Callable[[], Any]) -> None:
    for call in calls:
        try:
            call()
        except ForkedProcess:
            continue
        os._exit(70)


def works(worker: BlockingWorker, scheduler: BlockingScheduler, registrations: int = 1) -> None:
    """Check that the parent goes on as if nothing had been."""
    assert worker.generation == 1
    assert worker.ping()
    assert worker.store(PROMPT, IDS).reason in {"stored", "present"}
    assert worker.retrieve(PROMPT, IDS).reason == "loaded"
    assert scheduler.release(scheduler.lookup(PROMPT).lease)
    assert worker.stats()["registrations"] == registrations
    beats = worker.stats()["pings"]
    end = time.monotonic() + 10
    while worker.stats()["pings"] < beats + 2:  # the heartbeat thread's loop still wakes
        assert time.monotonic() < end
        time.sleep(0.01)


def calls_of(worker: BlockingWorker, scheduler: BlockingScheduler) -> list[Callable[[], Any]]:
    return [
        lambda: worker.store(PROMPT, IDS),
        lambda: worker.retrieve(PROMPT, IDS),
        lambda: worker.submit_store(PROMPT, IDS),
        lambda: worker.submit_retrieve(PROMPT, IDS),
        worker.ping,
        worker.__enter__,
        lambda: scheduler.lookup(PROMPT),
        lambda: scheduler.release("a-lease"),
    ]


def exits(url: str) -> None:
    """However a child ends, it is refused and does no harm; what a call gave is of no use to it either."""
    worker, scheduler = blocking(url)
    with worker, scheduler:
        for one in (worker, scheduler):
            try:
                pickle.dumps(one)
            except TypeError:
                continue
            raise AssertionError
        call = worker.submit_store(PROMPT, IDS)
        assert fork(lambda: refused(call.done, call.result, call.exception)) == 0
        assert call.result().reason == "stored"
        works(worker, scheduler)

        def left() -> None:
            refused(*calls_of(worker, scheduler))
            worker.close()  # nothing
            scheduler.close()

        def raised() -> None:
            refused(*calls_of(worker, scheduler))
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - it ends with this process
            with worker, contextlib.suppress(ForkedProcess):
                pass
            raise ValueError

        def at_once() -> None:
            refused(*calls_of(worker, scheduler))
            os._exit(7)

        assert fork(left) == 0
        works(worker, scheduler)
        assert fork(at_once) == 7
        works(worker, scheduler)
        assert fork(lambda: sys.exit(8)) == 8
        works(worker, scheduler)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(ForkedProcess):
                raised()
        assert ended(pid) == 1
        works(worker, scheduler)


def own(url: str) -> None:
    """A child makes workers of its own, also one by one of its own children."""
    worker, scheduler = blocking(url)
    with worker, scheduler:

        def inside() -> None:
            mine, ask = blocking(url)
            with mine, ask:
                assert mine.instance_id != worker.instance_id
                assert mine.store(PROMPT, IDS).reason in {"stored", "present"}
                assert ask.lookup(PROMPT).reason == "hit"
                assert fork(lambda: refused(*calls_of(mine, ask))) == 0
                assert mine.retrieve(PROMPT, IDS).reason == "loaded"

        assert fork(inside) == 0
        works(worker, scheduler)


GOOD = {"present", "loaded", "hit"}
LATE = {"unhealthy", "timeout", "in_doubt"}


def busy(url: str) -> None:
    """Other threads are in the midst of calls whenever this one forks."""
    worker, scheduler = blocking(url)
    stop = threading.Event()
    reasons: set[str] = set()

    def work() -> None:
        while not stop.is_set():
            reasons.update({worker.store(PROMPT, IDS).reason, worker.retrieve(PROMPT, IDS).reason})
            reasons.add(scheduler.lookup(PROMPT).reason)

    with worker, scheduler:
        works(worker, scheduler)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for n in range(8):
            inside = calls_of(worker, scheduler)
            assert fork(lambda calls=inside: refused(*calls)) == 0, n  # type: ignore[misc]
        stop.set()
        for thread in threads:
            thread.join()
        # On a machine that is busy with other things an answer may be late; none may be wrong.
        assert {"present", "loaded", "hit"} <= reasons <= GOOD | LATE, reasons
        while worker.retrieve(PROMPT, IDS).reason in LATE or scheduler.lookup(PROMPT).reason in LATE:
            time.sleep(0.01)
        works(worker, scheduler)


def awaited(url: str) -> None:
    """The asynchronous ones, forked in a coroutine."""

    async def main() -> None:
        async with (
            lmlive.Worker(url, kv_caches=cache(), block_tokens=16, model="m", config=CONFIG) as worker,
            lmlive.Scheduler(url, model="m", config=CONFIG) as scheduler,
        ):
            for _ in range(3):
                pid = os.fork()
                if pid == 0:
                    for call in (worker.store(PROMPT, IDS), worker.ping(), scheduler.lookup(PROMPT)):
                        refused(lambda call=call: asyncio.run(call))  # type: ignore[misc]
                    asyncio.run(worker.close())
                    os._exit(0)
                assert ended(pid) == 0
                assert await worker.ping()
                assert (await worker.store(PROMPT, IDS)).reason in {"stored", "present"}
                assert (await scheduler.lookup(PROMPT)).reason == "hit"
                assert (worker.generation, worker.stats()["registrations"]) == (1, 1)

    asyncio.run(main())


def in_pool(url: str) -> str:
    with BlockingWorker(url, kv_caches=cache(), block_tokens=16, model="m", config=CONFIG) as worker:
        return worker.store(PROMPT, IDS).reason


def pools(url: str) -> None:
    """Processes of ``multiprocessing``, however they are started, make workers of their own."""
    worker, scheduler = blocking(url)
    with worker, scheduler:
        for method in ("fork", "forkserver", "spawn"):
            with multiprocessing.get_context(method).Pool(1) as pool:
                assert pool.apply(in_pool, (url,)) in {"stored", "present"}
            works(worker, scheduler)


def outlived(url: str) -> None:
    """A child holds what it inherited when its parent ends; it ends with our input."""
    global kept  # noqa: PLW0603 - one that is dropped would be closed, and say goodbye
    kept = blocking(url)
    worker = kept[0]
    worker.__enter__()
    worker.store(PROMPT, IDS)
    assert worker.ping()  # else it may end before its first beat: never pinged, which is another window
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)


def left_open(url: str) -> None:
    """Nobody closes anything."""
    global kept  # noqa: PLW0603 - it lives until the interpreter has ended
    kept = blocking(url)
    for one in kept:
        one.__enter__()
    works(*kept)


kept: tuple[BlockingWorker, BlockingScheduler]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of forking with threads
    globals()[sys.argv[2]](sys.argv[1])
    sys.stdout.write("fine\n")
    sys.stdout.flush()
    if sys.argv[2] == "outlived":
        os._exit(0)
