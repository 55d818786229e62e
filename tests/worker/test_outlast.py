import asyncio

import pytest

from lmlive.errors import WorkerClosed
from lmlive.worker.outlast import outlast


async def test_it_waits_to_the_end_and_is_cancelled_afterwards() -> None:
    go_on, ended = asyncio.Event(), []

    async def work() -> None:
        await go_on.wait()
        ended.append(True)

    task = asyncio.ensure_future(work())
    waiting = asyncio.ensure_future(outlast(task))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended


async def test_it_raises_what_the_task_raised() -> None:
    async def fail() -> None:
        raise WorkerClosed

    with pytest.raises(WorkerClosed):
        await outlast(asyncio.ensure_future(fail()))
