"""A server process, one of whose copies stands still in the middle of a slice until a test lets it go on."""

import contextlib
import errno
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from lmlive.testing.processes import ServerProcess
from tests.conftest import eventually

ROOT = str(Path(__file__).parents[2])


class HeldServer(ServerProcess):
    """Runs ``kv_server``.

    Args:
        run_dir: The server's.
        copy: "gather" or "scatter".
        after: How many of its slices go through first.
    """

    def __init__(self, run_dir: Path, copy: str, after: int = 0) -> None:
        super().__init__(run_dir=run_dir, environ={"PYTHONPATH": ROOT})
        self._fifo = run_dir.with_suffix(".fifo")
        words = (str(run_dir), str(self._fifo), copy, str(after))
        self.arguments = (sys.executable, "-m", "tests.processes.kv_server", *words)

    async def __aenter__(self) -> Self:
        os.mkfifo(self._fifo)
        return await super().__aenter__()

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        self._fifo.unlink()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait until the copy is held up; it goes on at the end."""
        gate: int = await eventually(self._open)
        try:
            yield
        finally:
            os.close(gate)

    async def stand_still(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.stop()
        await eventually(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def _open(self) -> int:
        """Open the gate's fifo; 0 while nobody reads there."""
        try:
            return os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            assert error.errno == errno.ENXIO
            return 0
