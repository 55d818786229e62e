"""Waiting for what must come to its end, also if the one who waits is cancelled. One loop."""

import asyncio


async def outlast(task: "asyncio.Task[None]") -> None:
    """Wait until a task is done, and raise what it raised; a cancelling meanwhile is honoured afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
