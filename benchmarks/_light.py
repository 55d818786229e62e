"""Light workers: processes that hold a tether and do nothing, a thousand of them in a second or two.

Each opens a tether of its own, so that the kernel names it, and sleeps: a C program of some pages where gcc is there,
else a fork of this one, which the kernel takes ten times as long to clear away. Registering, and every
PING, goes over one connection from here: the wire ties a registration to its process by the secret alone. One more
process watches them by pidfds of its own, and stamps each exit when the kernel tells it: that is what a verdict is
compared with.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import zmq

from lmlive.protocol.codec import decode_body, decode_header, encode_request
from lmlive.protocol.tether import MAX_PACKET_BYTES, Offer, Receipt, decode_answer
from lmlive.protocol.verbs import Role, Verb

_STAMP = struct.Struct("<Qd")
_PR_SET_PDEATHSIG = 1
_ANSWER_MS = 20_000


class LightWorker(NamedTuple):
    """One process that holds a tether.

    Args:
        instance_id: Of its registration.
        pid: Its process.
        pidfd: Of it; -1 once it is given up.
    """

    instance_id: int
    pid: int
    pidfd: int

    @property
    def secret(self) -> bytes:
        """What its registration is tied to it by."""
        return self.instance_id.to_bytes(16, "little")


class LightWorkers:
    """Some light workers, and the process that stamps their exits; leaving kills what still lives.

    To be entered before this process has threads.

    Args:
        url: An ipc address of the server.
        count: How many.
        memory: Bytes of the memory that each offers beside; 0 for none.
    """

    def __init__(self, url: str, count: int, memory: int = 0) -> None:
        _allow_descriptors(2 * count + 64)
        self._folder = tempfile.TemporaryDirectory(prefix="lmlive-")
        self._tether = f"{url.removeprefix('ipc://')}.tether"
        self._count = count
        self._memory = memory
        self._program = _build(Path(self._folder.name))
        self._watcher = 0
        self._stamps = -1
        self.all: list[LightWorker] = []

    def __enter__(self) -> Self:
        try:
            for instance_id in range(1, self._count + 1):
                self.all.append(self._start(instance_id))
            self._stamps, self._watcher = _fork_watcher(self.all)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            os.waitpid(worker.pid, 0)
            os.close(worker.pidfd)
        if self._watcher:
            os.kill(self._watcher, signal.SIGKILL)
            os.waitpid(self._watcher, 0)
            os.close(self._stamps)
        self._folder.cleanup()

    def kill(self, worker: LightWorker) -> None:
        """Send SIGKILL; its exit is stamped, and its parent asks for it only at the end."""
        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def exits(self, count: int) -> dict[int, float]:
        """Wait for so many exits more; give the seconds of CLOCK_MONOTONIC at which each was told, by instance."""
        found: dict[int, float] = {}
        content = b""
        while len(found) < count:
            content += os.read(self._stamps, 65_536)
            whole = len(content) - len(content) % _STAMP.size
            found.update(_STAMP.iter_unpack(content[:whole]))
            content = content[whole:]
        return found

    @property
    def in_c(self) -> bool:
        """Whether they are the C program."""
        return self._program is not None

    def _start(self, instance_id: int) -> LightWorker:
        read, write = os.pipe()
        count = 1 if self._memory else 0
        offer = Offer(instance_id.to_bytes(16, "little"), instance_id, Role.WORKER, 0, count).encode()
        try:
            if self._program is not None:
                os.set_inheritable(write, True)
                arguments = [self._program, self._tether, offer.hex(), str(write), str(self._memory)]
                pid = os.posix_spawn(self._program, arguments, {})
            else:
                pid = os.fork()
                if pid == 0:
                    _be_a_worker(self._tether, offer, write, self._memory)
        finally:
            os.close(write)
        try:
            if os.read(read, 1) != b"+":
                raise RuntimeError("a light worker found no tether")
        finally:
            os.close(read)
        return LightWorker(instance_id, pid, os.pidfd_open(pid))


class Connection:
    """A connection for all of them.

    Args:
        url: The server's.
    """

    def __init__(self, url: str) -> None:
        self._context = zmq.Context()
        self._sock = self._context.socket(zmq.DEALER)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.setsockopt(zmq.RCVTIMEO, _ANSWER_MS)
        self._sock.connect(url)
        self._number = 0
        self.epoch = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._context.term()

    def ask(self, verb: Verb, payload: list[object], **header: int) -> Any:
        """Send a request and give the first field of its result."""
        self._number += 1
        self._sock.send(encode_request(verb, self._number, payload, **header))
        reply = self._sock.recv()
        found, body = decode_header(reply), decode_body(reply)
        if found.code:
            raise RuntimeError(f"{verb.name} failed: {body}")
        self.epoch = found.epoch
        return body[0]

    def register(self, worker: LightWorker) -> None:
        """Register a worker without memory."""
        payload = [worker.secret, "light", "", 0, 1, "", "", "none", "auto", [], []]
        self.ask(Verb.REGISTER, payload, instance_id=worker.instance_id)

    def ping(self, worker: LightWorker, generation: int) -> None:
        """Send a worker's PING."""
        self.ask(
            Verb.PING,
            [worker.instance_id],
            epoch=self.epoch,
            instance_id=worker.instance_id,
            generation=generation,
        )

    def generations(self) -> dict[int, int]:
        """Give the generation of each live instance."""
        instances = self.ask(Verb.STATUS, [])["instances"]
        return {int(one["instance_id"]): one["generation"] for one in instances}

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        """Give all events after a number, however many calls it takes."""
        found: list[dict[str, Any]] = []
        while page := self.ask(Verb.EVENTS, [after, 1000]):
            found += page
            after = page[-1]["seq"]
        return found

    def reaps(self, count: int, seconds: float) -> dict[int, float]:
        """Wait until so many were reaped in all; give the seconds of CLOCK_MONOTONIC of each verdict, by instance."""
        found: dict[int, float] = {}
        after, end = 0, time.monotonic() + seconds
        while len(found) < count and time.monotonic() < end:
            events = self.events(after)
            for event in events:
                after = event["seq"]
                if event["kind"] == "reaped":
                    found[int(event["instance_id"])] = event["at"]
            if not events:
                time.sleep(0.02)
        return found


@contextlib.contextmanager
def light_server(*flags: str) -> Iterator[str]:
    """Run a server for light workers, whose timeouts may be short; give its address."""
    environ = os.environ | {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
    with tempfile.TemporaryDirectory(prefix="lmlive-") as directory:
        run_dir = Path(directory) / "run"
        command = [sys.executable, "-m", "lmlive.server", "--run-dir", run_dir, "--pool-bytes", "1MiB", *flags]
        with (Path(directory) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environ, text=True)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line.startswith("lmlive ready"):
                raise RuntimeError("the server did not start")
            yield line.split("bind=")[1].split()[0]
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def _build(folder: Path) -> str | None:
    """Compile the C program; None where that is not possible."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    target = folder / "light_worker"
    command = [compiler, "-O2", "-static", "-o", target, Path(__file__).with_name("light_worker.c")]
    built = subprocess.run(command, check=False, capture_output=True)
    return str(target) if built.returncode == 0 else None


def _be_a_worker(tether: str, offer: bytes, ready: int, memory: int) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10.0)
        sock.connect(tether)
        sock.recv(MAX_PACKET_BYTES)
        socket.send_fds(sock, [offer], [_memory_of(memory)] if memory else [])
        if isinstance(decode_answer(sock.recv(MAX_PACKET_BYTES)), Receipt):
            os.write(ready, b"+")
            while True:
                signal.pause()
    finally:
        os._exit(1)


def _memory_of(nbytes: int) -> int:
    """Make a sealed memory file, as a worker does."""
    memory = os.memfd_create("lmlive-light", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(memory, nbytes)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def _fork_watcher(workers: Sequence[LightWorker]) -> tuple[int, int]:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return read, pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        poll = select.epoll()
        by_fd = {worker.pidfd: worker.instance_id for worker in workers}
        for fd in by_fd:
            poll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
        while True:
            ready = poll.poll()
            now = time.monotonic()
            os.write(write, b"".join(_STAMP.pack(by_fd[fd], now) for fd, _ in ready))
    finally:
        os._exit(1)


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
