"""The demo's engine processes: started, asked and killed from one place."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
ANSWER_SECONDS = 60.0


class EngineProcess:
    """An engine as a child process that takes commands and gives answers, a line each."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, first_line: str) -> None:
        self.name = name
        self.first_line = first_line
        self._process = process

    @classmethod
    async def start(cls, name: str, url: str) -> Self:
        """Start it against a server and wait until it is registered."""
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "examples.demo.engine",
            url,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            cwd=ROOT,
        )
        started = cls(name, process, "")
        started.first_line = await started.read_line()
        return started

    @property
    def pid(self) -> int:
        """Give the process id."""
        return self._process.pid

    async def read_line(self) -> str:
        """Give the next line; an ended process is an error that says so."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_SECONDS)
        if not line:
            raise EOFError(f"{self.name} ended with status {await self._process.wait()}")
        return line.decode().strip()

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and give its answer."""
        self.send(do, **arguments)
        answer: dict[str, Any] = json.loads(await self.read_line())
        return answer

    def send(self, do: str, **arguments: Any) -> None:
        """Send one command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def exit_status(self) -> int:
        """Wait for the end; a negative number is the signal that ended it."""
        return await asyncio.wait_for(self._process.wait(), ANSWER_SECONDS)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> int:
        """End its stdin, which ends it, and give its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self.exit_status()


def maps_inode(pid: int, inode: int) -> bool:
    """Tell whether a process maps the file with this inode."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) for line in lines)
