"""One call on its way: what may touch its blocks, and how it was ended from here. The loop that owns the worker."""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

from lmlive.worker.reply import Reply
from lmlive.worker.unsettled import Doubt

GRACE: Final = 0.25
"""Seconds after its deadline for which a request's terminal answer is waited for."""


@dataclass(slots=True, eq=False)
class Flight:
    """One call on its way.

    Args:
        touching: Whether the server, or a copy of ours, may touch the caller's blocks now.
        cancelled: Whether the caller gave up.
        silenced: Whether it was ended before anything was sent, because the server stopped to answer.
        doubt: The retrieve that was sent last; None for a store, or if nothing was sent.
        task: Carries it out.
        request: What waits for its reply; None while nothing does.
        mirrored: Whether the mirror holds what is to be stored.
        copying: Whether a copy of our own has begun and is not over.
    """

    touching: bool = False
    cancelled: bool = False
    silenced: bool = False
    doubt: Doubt | None = None
    task: asyncio.Task[Any] | None = None
    request: asyncio.Future[Reply] | None = None
    mirrored: bool = False
    copying: bool = False
