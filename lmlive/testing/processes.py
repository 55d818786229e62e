"""A real server in a process of its own, to be killed, stopped and looked into.

It ends only what it started, by its pid, and what it started never outlives the test: leaving the ``async with`` kills.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self

_START_SECONDS: Final = 15.0


class ServerProcess:
    """``python -m lmlive.server`` as a child.

    Lifecycle: entering returns when the ready line was read; leaving kills what still runs.

    Args:
        arguments: Flags of the server.
        run_dir: Its run directory, as ``--run-dir``.
        environ: Variables on top of our own.
        python: The interpreter.

    Raises:
        RuntimeError: At entry, if it ended without a ready line; the text has its log.
    """

    def __init__(
        self,
        *arguments: str,
        run_dir: str | os.PathLike[str],
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.arguments: Sequence[str] = (python, "-m", "lmlive.server", "--run-dir", os.fspath(run_dir), *arguments)
        self.ready: dict[str, str] = {}
        """What the ready line said: bind, http, pid, epoch, version."""
        self._environ = {**os.environ, **(environ or {})}
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None

    def __repr__(self) -> str:
        """Name the process and its state."""
        process = self._process
        state = "not started" if process is None else f"pid={process.pid} status={process.returncode}"
        return f"<ServerProcess {state}>"

    async def __aenter__(self) -> Self:
        """Start it and wait until it serves."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit; a pipe would fill up and stop the server
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.arguments, env=self._environ, stdout=asyncio.subprocess.PIPE, stderr=self._log
            )
            await self._wait_ready(self._process)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill it if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self.kill()
            await self.wait()
        if self._process is not None and self._process.stdout is not None:
            await self._process.stdout.read()
        if self._log is not None:
            self._log.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._started().pid

    @property
    def urls(self) -> tuple[str, ...]:
        """Where its ROUTER listens."""
        return tuple(self.ready["bind"].split(","))

    @property
    def url(self) -> str:
        """The first of its addresses."""
        return self.urls[0]

    @property
    def epoch(self) -> int:
        """Its epoch."""
        return int(self.ready["epoch"], 16)

    @property
    def log(self) -> str:
        """What it has logged up to now."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: drain, and end."""
        self._signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def wait(self) -> int:
        """Wait for its end and give its exit status; negative for a signal."""
        return await self._started().wait()

    def mappings(self) -> list[str]:
        """Name what files it has mapped, as in ``/proc/<pid>/maps``; anonymous memory is left out."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return [fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) > 5]

    def descriptors(self) -> dict[int, str]:
        """Name what its descriptors stand for, as in ``/proc/<pid>/fd``."""
        found: dict[int, str] = {}
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found[int(entry.name)] = str(entry.readlink())
        return found

    def holds(self, name: str) -> list[str]:
        """List mappings and descriptors that name something, such as a memfd: empty once all of it was released."""
        return [text for text in (*self.mappings(), *self.descriptors().values()) if name in text]

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> None:
        output = process.stdout
        if output is None:
            raise RuntimeError("the server has no stdout")
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = (await output.readline()).decode()
        except TimeoutError:
            raise RuntimeError(f"the server said nothing in {_START_SECONDS:g} s:\n{self.log}") from None
        if not line.startswith("lmlive ready "):
            status = await process.wait() if not line else None
            raise RuntimeError(f"the server did not get ready (status {status}): {line!r}\n{self.log}")
        self.ready = dict(field.split("=", 1) for field in line.split()[2:])

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the server was not started: use it in an `async with`")
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: so be it
            self._started().send_signal(number)
