"""A call that fails leaves nothing to the garbage collector, which engines put off for as long as they can."""

import gc
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import lmlive
from lmlive.errors import LMLiveError
from lmlive.worker.outcome import let_go
from tests.worker.fake_server import FakeServer


def test_an_error_is_cut_loose_from_all_its_frames() -> None:
    def fail() -> None:
        try:
            raise KeyError("inner")  # noqa: TRY301 - it is about rings of errors
        except KeyError as inner:
            raise LMLiveError("outer") from inner

    with pytest.raises(LMLiveError) as caught:
        fail()
    error = caught.value
    let_go(error)
    assert error.__traceback__ is None
    assert error.__cause__ is not None
    assert error.__cause__.__traceback__ is None
    let_go(None)


async def test_failed_calls_leave_no_rings(run_dir: Path) -> None:
    cache = {"kv": lmlive.shared_empty((64, 16, 8), "float32")}
    tokens, blocks = list(range(128)), list(range(8))
    with FakeServer(run_dir) as server:
        server.limits["tokens"] = 64
        async with (
            lmlive.Worker(server.url, kv_caches=cache, model="m") as worker,
            lmlive.Scheduler(server.url, model="m") as scheduler,
        ):
            calls: dict[str, Callable[[], Awaitable[object]]] = {
                "store": lambda: worker.store(tokens, blocks),
                "retrieve": lambda: worker.retrieve(tokens, blocks),
                "late store": lambda: worker.store(tokens[:64], blocks[:4], deadline=time.monotonic() - 1),
                "late retrieve": lambda: worker.retrieve(tokens[:64], blocks[:4], deadline=time.monotonic() - 1),
                "lookup": lambda: scheduler.lookup(tokens),
            }
            for name, call in calls.items():
                await call()
                gc.collect()
                gc.disable()
                try:
                    for _ in range(20):
                        await call()
                    assert gc.collect() < 20, name  # fewer than one object for each call
                finally:
                    gc.enable()
