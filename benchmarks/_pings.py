"""Servers and clients of the PING benchmarks, each in a process of its own.

A server is anything that answers one frame with one frame. A client keeps a number of requests in flight on one
DEALER and gives every round trip. Clients come in two kinds, plain Python on a raw socket, and C where gcc is there:
the former is what a Python worker sees, the latter leaves the machine to the server.
"""

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import zmq

from lmlive.protocol.codec import decode_header, encode_request
from lmlive.protocol.messages import Hello, Register
from lmlive.protocol.verbs import Role, Verb

PYTHON_PEER = """
import sys, time
import numpy, zmq
url, in_flight, seconds, template, offset, lead = sys.argv[1:7]
in_flight, seconds, offset, template = int(in_flight), float(seconds), int(offset), bytes.fromhex(template)
peer = zmq.Context().socket(zmq.DEALER)
peer.setsockopt(zmq.RCVTIMEO, 10_000)
peer.connect(url)
recv, send, clock, more = peer.recv, zmq.backend.Socket.send, time.perf_counter, int(zmq.SNDMORE)
if lead == "parts":
    import msgpack
    ids = [msgpack.packb(1_000_000 + slot) for slot in range(in_flight)]
    rest = msgpack.unpackb(template)
    def ask(key):
        send(peer, key, more); send(peer, rest[0], more); send(peer, rest[1], 0)
    def answer():
        key = recv()
        while peer.rcvmore: recv()
        return key
else:
    frames = {}
    for slot in range(in_flight):
        key = slot.to_bytes(8, "little")
        frames[key] = template[:offset] + key + template[offset + 8:]
    ids = list(frames)
    end = offset + 8
    def ask(key):
        send(peer, frames[key], 0)
    def answer():
        return recv()[offset:end]
ask(ids[0]); answer()
print("ready", flush=True)
sys.stdin.readline()
sent, trips, begin = {}, [], clock()
note = trips.append
for key in ids:
    sent[key] = clock()
    ask(key)
now = begin
while now - begin < seconds:
    key = answer()
    now = clock()
    note(now - sent[key])
    sent[key] = now
    ask(key)
out = sys.stdout.buffer
out.write(numpy.float64(now - begin).tobytes())
out.write((numpy.array(trips) * 1e6).astype("<f4").tobytes())
out.flush()
peer.close(0)
"""

BARE_ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
recv, send, more = router.recv, router.send, int(zmq.SNDMORE)
print("ready", flush=True)
while True:
    peer = recv()
    frame = recv()
    send(peer, more)
    send(frame)
"""


class Server(NamedTuple):
    """A server that runs.

    Args:
        url: Its address.
        pid: Its process.
        request: The frame of a PING; for a protocol of several frames, msgpack of the frames after the id.
        id_offset: Where the request's id stands in it.
        parts: Whether the protocol has several frames.
    """

    url: str
    pid: int
    request: bytes
    id_offset: int = 8
    parts: bool = False


class Load(NamedTuple):
    """What the clients measured.

    Args:
        rate: Answers per second of all together.
        trips: Every round trip in microseconds.
        cpu_us: CPU microseconds of the server per answer, all its threads.
    """

    rate: float
    trips: npt.NDArray[np.float32]
    cpu_us: float

    def at(self, quantile: float) -> float:
        """Give a quantile of the round trips in microseconds."""
        return float(np.quantile(self.trips, quantile))


@contextlib.contextmanager
def lmlive_server(*flags: str) -> Iterator[Server]:
    """Run ``python -m lmlive.server`` on a unix socket."""
    with tempfile.TemporaryDirectory(prefix="lm-") as folder:
        command = [sys.executable, "-m", "lmlive.server", "--run-dir", folder, "--pool-bytes", "16MiB", *flags]
        with _process(command, "lmlive ready ") as process:
            url = f"ipc://{folder}/router.sock"
            yield Server(url, process.pid, registered_ping(url))


@contextlib.contextmanager
def bare_echo() -> Iterator[Server]:
    """Run a blocking Python loop over a raw ROUTER: no protocol, no event loop, no second thread."""
    with tempfile.TemporaryDirectory(prefix="lm-") as folder:
        url = f"ipc://{folder}/echo"
        with _process([sys.executable, "-c", BARE_ECHO, url], "ready") as process:
            yield Server(url, process.pid, encode_request(Verb.PING, 0, [None]))


def registered_ping(url: str) -> bytes:
    """Register an instance without memory, and give the frame of its PING: one that touches and proves."""
    instance_id, secret = uuid.uuid4().int & (2**63 - 1), os.urandom(16)
    hello = Hello(min_version=1, max_version=1, role=Role.WORKER, software="benchmark", secret=secret)
    register = Register(
        secret=secret,
        model="benchmark",
        revision="",
        rank=0,
        world_size=1,
        kv_dtype="",
        format="",
        mode="none",
        strategy="",
        groups=(),
        handles=(),
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(url)
        messages: list[Hello | Register] = [hello, register]
        for number, message in enumerate(messages):
            peer.send(encode_request(message.verb, number, message.to_payload(), instance_id=instance_id))
            header = decode_header(peer.recv())
            if header.code:
                raise RuntimeError(f"{message.verb.name} was refused with status {header.code}")
    return encode_request(
        Verb.PING, 0, [instance_id], epoch=header.epoch, instance_id=instance_id, generation=header.generation
    )


@contextlib.contextmanager
def lmcache_server(python: str, port: int) -> Iterator[Server]:
    """Run LMCache's multiprocess server with the interpreter that has it installed; it knows TCP alone."""
    command = [python, "-m", "lmcache.v1.multiprocess.http_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(port + 1), "--l1-size-gb", "1"]
    command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "lmcache_driven"]
    environ = os.environ | {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
    url = f"tcp://127.0.0.1:{port}"
    try:
        _wait_for_lmcache(process, url)
        rest = [msgpack.packb(22), msgpack.packb(12345)]
        yield Server(url, process.pid, msgpack.packb(rest), parts=True)
    finally:
        _end(process)


def build_c_peer(folder: Path) -> Path | None:
    """Compile the C client against pyzmq's own libzmq; None where that is not possible."""
    compiler = shutil.which("gcc")
    libraries = sorted((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*.so*"))
    if compiler is None or not libraries:
        return None
    library, target = libraries[0], folder / "ping_peer"
    source = Path(__file__).with_name("ping_peer.c")
    command = [compiler, "-O2", "-o", str(target), str(source), str(library), f"-Wl,-rpath,{library.parent}"]
    command += ["-Wl,--allow-shlib-undefined"]
    built = subprocess.run(command, check=False, capture_output=True)
    return target if built.returncode == 0 else None


def load(server: Server, clients: int, in_flight: int, seconds: float, c_peer: Path | None = None) -> Load:
    """Let clients ask as fast as they get answers."""
    if c_peer is not None:
        command: Sequence[str] = (str(c_peer),)
        tail: Sequence[str] = ()
    else:
        command, tail = (sys.executable, "-c", PYTHON_PEER), ("parts" if server.parts else "frame",)
    arguments = [*command, server.url, str(in_flight), str(seconds), server.request.hex(), str(server.id_offset), *tail]
    peers = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(clients)]
    try:
        for peer in peers:
            if peer.stdout is None or peer.stdout.readline() != b"ready\n":
                raise RuntimeError("a client did not get an answer")
        before = cpu_seconds(server.pid)
        for peer in peers:
            if peer.stdin is not None:
                peer.stdin.write(b"go\n")
                peer.stdin.flush()
        outputs = [peer.communicate(timeout=seconds + 30)[0] for peer in peers]
        used = cpu_seconds(server.pid) - before
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    trips = [np.frombuffer(output, dtype="<f4", offset=8) for output in outputs]
    rate = sum(len(part) / struct.unpack_from("<d", output)[0] for part, output in zip(trips, outputs, strict=True))
    joined = np.concatenate(trips)
    return Load(rate, joined, used * 1e6 / max(1, len(joined)))


def cpu_seconds(pid: int) -> float:
    """Sum the CPU time of all threads of a process, from the scheduler's nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def _process(command: Sequence[str], ready: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
        if not line.startswith(ready):
            raise RuntimeError(f"{command[:4]} did not get ready: {line!r}")
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _wait_for_lmcache(process: subprocess.Popen[bytes], url: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    end = time.monotonic() + 180
    try:
        while time.monotonic() < end and process.poll() is None:
            with context.socket(zmq.DEALER) as probe:
                probe.linger = 0
                probe.connect(url)
                probe.send_multipart([msgpack.packb(0), msgpack.packb(22), msgpack.packb(None)])
                if probe.poll(500):
                    return
        raise RuntimeError("LMCache's server did not get ready")
    finally:
        context.destroy(0)
