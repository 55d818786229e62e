"""A real server in a process of its own, which also tells how much it holds, and fails where it is told to.

``Subject`` starts it and asks; ``python -m tests.fuzz.subject RUN_DIR`` is it. With the setting ``goes_wrong`` it
serves PREPARE_STORE in its own way: its ``skip_tokens`` says what goes wrong, see ``Wrong``.
"""

import asyncio
import contextlib
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Self

from lmlive.config import ServerConfig
from lmlive.errors import ServerDraining
from lmlive.liveness.roster import Reason
from lmlive.modules.books import Books
from lmlive.modules.call import Call
from lmlive.modules.handler import Lane, Work
from lmlive.modules.removal import remove
from lmlive.protocol.messages import PrepareStore
from lmlive.protocol.verbs import Verb
from lmlive.server.dispatcher import HANDLERS
from lmlive.server.router import Router
from lmlive.server.server import LivenessServer

ROOT: Final = str(Path(__file__).parents[2])
MODEL: Final = "m"
WITNESS: Final = "witness"
"""The model of the worker that nobody may harm."""
CHUNK: Final = 64
SETTINGS: Final[dict[str, Any]] = {
    "pool_bytes": "4MiB",
    "chunk_tokens": CHUNK,
    "max_message_bytes": "16KiB",
    "max_tokens": 64 * CHUNK,
    "max_blocks": 512,
    "transfer_threads": 1,
    "register_threads": 1,
}
_SLOW_SECONDS: Final = 0.02
_PATIENCE: Final = 20.0


class Wrong(IntEnum):
    """What goes wrong with a PREPARE_STORE."""

    ADMIT_RAISES = 0
    LANE_RAISES = 1
    SETTLE_RAISES = 2
    FORGOTTEN = 3
    FORGOTTEN_IN_SETTLE = 4
    NOT_ENCODABLE = 5
    ANSWERED_TWICE = 6
    SLOW = 7
    HELD = 8


class Subject:
    """The process.

    Attributes:
        url: Its unix socket.
        tcp: Its other address.
        epoch: Its epoch.
        pid: Its process.
    """

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.url = self.tcp = ""
        self.epoch = self.pid = 0
        self._run_dir = run_dir
        self._settings = {**SETTINGS, **settings}
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed at exit; a pipe would fill up
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fuzz.subject", str(self._run_dir), json.dumps(self._settings)),
            env={**os.environ, "PYTHONPATH": ROOT},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
        )
        try:
            said = await self._hear()
        except BaseException:
            await self.__aexit__()
            raise
        self.url, self.tcp, self.epoch, self.pid = said["url"], said["tcp"], said["epoch"], said["pid"]
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()
        if self._log is not None:
            self._log.close()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.returncode is None

    @property
    def log(self) -> str:
        """What it logged."""
        assert self._log is not None
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    async def ask(self, what: str) -> Any:
        """Have it do something: "counts", "quiet" (no log), "loud", "release" (what is held), or be in a state."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        return await self._hear()

    async def counts(self) -> dict[str, int]:
        """Count what it holds."""
        found = await self.ask("counts")
        assert isinstance(found, dict)
        return found

    async def still(self) -> dict[str, int]:
        """Count what it holds once nothing is on its way, and fail if that never comes."""
        for _ in range(500):
            counts = await self.counts()
            if not any(counts[name] for name in ON_THE_WAY):
                return counts
            await asyncio.sleep(0.01)
        raise AssertionError(f"never still: {counts}")

    async def _hear(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(_PATIENCE):
            line = await self._process.stdout.readline()
        assert line, f"the server is gone:\n{self.log}"
        return json.loads(line)


ON_THE_WAY: Final = ("outstanding", "in_flight", "pings", "lanes", "openings", "kept", "reserved", "busy", "releases")
"""What is 0 where nothing is on its way."""


def rss_kib(pid: int) -> int:
    """Give how much memory a process has now, in KiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError(f"no such process: {pid}")


# The process


def go_wrong(held: list[Call], books: Books, call: Call) -> Work | None:
    """Serve a PREPARE_STORE badly."""
    wrong = Wrong(call.body(PrepareStore).skip_tokens)
    if wrong is Wrong.ADMIT_RAISES:
        raise ZeroDivisionError("injected into admit")
    if wrong is Wrong.NOT_ENCODABLE:
        call.reply([object()])
    elif wrong is Wrong.ANSWERED_TWICE:
        call.fail(ZeroDivisionError("injected"))
        call.reply([True])
    elif wrong is Wrong.SLOW:
        call.defer()
        books.later(_SLOW_SECONDS, partial(call.reply, [True]))
    elif wrong is Wrong.HELD:
        call.defer()
        held.append(call)
    elif wrong is not Wrong.FORGOTTEN:
        return Work(Lane.REGISTER, partial(_raise_in_lane, wrong), partial(_settle, wrong, call))
    return None


def _raise_in_lane(wrong: Wrong) -> object:
    if wrong is Wrong.LANE_RAISES:
        raise ZeroDivisionError("injected into a lane")
    return None


def _settle(wrong: Wrong, call: Call, _: object, error: BaseException | None) -> None:
    if wrong is Wrong.SETTLE_RAISES:
        raise ZeroDivisionError("injected into settle")
    if error is not None:
        call.fail(error)


def count(server: LivenessServer) -> dict[str, int]:
    """Count all that could pile up."""
    gc.collect()
    parts = server._parts
    assert parts is not None
    books, dispatcher, lanes = parts.books, parts.dispatcher, parts.lanes
    status = server.status()
    door = parts.door
    assert isinstance(door, Router)
    return {
        "outstanding": dispatcher.outstanding,
        "in_flight": len(dispatcher._in_flight),
        "pings": len(dispatcher._pings._waiting),
        "lanes": lanes.outstanding,
        "busy": sum(lane["busy"] + lane["queued"] for lane in lanes.stats().values()),
        "openings": len(books.openings),
        "kept": len(door._outgoing.kept),
        "reserved": status.pool.reserved_chunks + status.pool.held_back_chunks,
        "releases": status.releases.pending + status.releases.stuck,
        "chunks": status.pool.chunks,
        "used_bytes": status.pool.used_bytes,
        "leased": status.pool.leased_chunks,
        "leases": len(books.leases._leases),
        "entries": len(books.entries),
        "registered": len(status.instances),
        "connections": door.connections,
        "said_hello": len(books.connections),
        "tethers": len(books.tethers),
        "tether_sockets": parts.tethers.connections,
        "waiting_fds": parts.tethers.peers._waiting.count,
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "bad_frames": status.wire.bad_frames,
        "dropped": status.wire.dropped_replies,
        "handshake_failures": status.wire.handshake_failures,
        "broken_rules": dispatcher.broken_rules,
        "errors": sum(status.wire.errors.values()),
        "internal_errors": status.wire.errors.get("InternalError", 0),
        "rss_kib": rss_kib(os.getpid()),
    }


async def serve(run_dir: str, settings: dict[str, Any]) -> None:
    """Be the server, and do what stdin says, line by line."""
    held: list[Call] = []
    if settings.pop("goes_wrong", False):
        HANDLERS[Verb.PREPARE_STORE] = partial(go_wrong, held)  # type: ignore[index]
    bind = (f"ipc://{run_dir}/router.sock", "tcp://127.0.0.1:0")
    async with LivenessServer(ServerConfig(run_dir=run_dir, bind=bind, **settings)) as server:
        parts = server._parts
        assert parts is not None
        does: dict[str, Callable[[], object]] = {
            "counts": partial(count, server),
            "release": partial(release, held),
            "sweep": partial(sweep, server),
        }
        lines = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        url, tcp = server.urls
        say({"url": url, "tcp": tcp, "epoch": server.epoch, "pid": os.getpid()})
        while what := (await lines.readline()).decode().strip():
            if what in does:
                say(does[what]())
            else:
                parts.books.state = what
                say(None)


def release(held: list[Call]) -> None:
    """Answer what is held."""
    for call in held:
        call.fail(ServerDraining("released"))
    held.clear()


def sweep(server: LivenessServer) -> None:
    """End all that is not the witness's: registrations, leases, chunks."""
    parts = server._parts
    assert parts is not None
    books = parts.books
    models = {space.model for space in books.store._spaces} - {WITNESS}
    for registration in books.roster.snapshot():
        if registration.model != WITNESS:
            removal = books.roster.reap(registration.instance_id, None, Reason.REQUESTED, books.moment())
            assert removal is not None
            remove(books, removal)
    for model in models:
        books.store.clear(model)
    for owner in tuple(books.leases._owners):
        books.leases.end_owner(owner)
    books.sweep()


def say(document: object) -> None:
    """Answer in one line."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2])))
