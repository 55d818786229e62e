"""Whose a worker or a scheduler is: one process, and in it the event loop that entered it."""

import asyncio
import os
from typing import NoReturn

from lmlive.errors import ForkedProcess, InvalidArgument


class Owner:
    """Refuses calls from where they cannot work.

    Args:
        what: What is owned, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent to another process, and with it the worker or scheduler."""
        raise TypeError(f"a {self._what} belongs to its process and cannot be sent to another: make a new one there")

    @property
    def elsewhere(self) -> bool:
        """Whether this is a forked child of the owner, in which nothing is to be done."""
        return os.getpid() != self._pid

    def settle_here(self) -> None:
        """Belong to the running loop from now on.

        Raises:
            ForkedProcess: In a forked child.
        """
        self.check()
        self._loop = asyncio.get_running_loop()

    def check(self) -> None:
        """Check the caller's process and loop.

        Raises:
            ForkedProcess: In a forked child.
            InvalidArgument: On another event loop than the one that entered it, which may be closed.
        """
        if self.elsewhere:
            raise ForkedProcess(f"this {self._what} belongs to the process that made it: make a new one here")
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            state = "which was closed without closing it" if self._loop.is_closed() else "which runs elsewhere"
            raise InvalidArgument(f"this {self._what} belongs to another event loop, {state}: make a new one here")
