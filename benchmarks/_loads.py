"""What else may go on while somebody PINGs: each load is a process of its own, until it is killed.

python benchmarks/_loads.py NAME URL     # says "ready" once it weighs on the server
python benchmarks/_loads.py serve ...    # the server, with memory of two sizes that is as slow as it can be

The server is the shipped one; only its host memory is replaced, so that a REGISTER takes a minute and a release never
ends without anything being wrong with the machine.
"""

import asyncio
import os
import secrets
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import numpy as np
import zmq
import zmq.asyncio

import lmlive
import lmlive.server.__main__ as server_main
from lmlive.device.backend import FdSource, Mapping
from lmlive.device.host import HostBackend
from lmlive.protocol.codec import decode_header, encode_request
from lmlive.protocol.tether import MAX_PACKET_BYTES, Offer
from lmlive.protocol.verbs import Role, Verb
from lmlive.server import assembly

SLOW_OPEN: Final = 11 * 4096
SLOW_SECONDS: Final = 60.0
STUCK_CLOSE: Final = 13 * 4096
REGISTER_THREADS: Final = 4
JOINING: Final = 1000
MAPPINGS: Final = 1024
LEASES: Final = 1000
TRANSFERS: Final = 3  # one more than the server has threads for, so that none is ever idle

_BLOCK = 16
_BEAT = {"heartbeat_start": "register", "heartbeat_interval": 1.0}


class SlowMemory(HostBackend):
    """Host memory, of which two sizes are as slow as a broken driver."""

    def open_handle(self, source: FdSource) -> Mapping:
        """Open it; of one size, after a minute."""
        if source.nbytes == SLOW_OPEN:
            threading.Event().wait(SLOW_SECONDS)
        return super().open_handle(source)

    def close_mapping(self, mapping: Mapping) -> None:
        """Close it; of one size, never."""
        if mapping.nbytes == STUCK_CLOSE:
            threading.Event().wait()
        super().close_mapping(mapping)


def serve(*flags: str) -> NoReturn:
    """Run the server."""
    assembly.HostBackend = SlowMemory  # type: ignore[misc]
    sys.exit(server_main.main(list(flags)))


def _worker(url: str, caches: dict[str, object], model: str, **settings: object) -> lmlive.Worker:
    config = lmlive.WorkerConfig(**_BEAT, **settings)
    return lmlive.Worker(url, kv_caches=caches, block_tokens=_BLOCK, model=model, config=config)


def _tensor(nbytes: int) -> object:
    return lmlive.shared_empty((nbytes // 4096, 512), "int64")


async def slow_register(url: str) -> None:
    """Keep all threads of the register lane busy for a minute each."""
    waiting = [
        _worker(url, {"kv": _tensor(SLOW_OPEN)}, f"slow-{n}", request_timeout=0.5) for n in range(REGISTER_THREADS)
    ]
    await asyncio.gather(*(worker.__aenter__() for worker in waiting))
    _ready()
    await asyncio.Event().wait()


async def transfers(url: str) -> None:
    """Store and retrieve 16 MiB at a time, without a pause."""

    async def go_on(number: int) -> None:
        cache = {f"plane.{n}": lmlive.shared_empty((512, 8192), "int64") for n in range(4)}
        worker = _worker(url, dict(cache), f"transfers-{number}", request_timeout=30.0)
        await worker.__aenter__()
        for round_ in range(1 << 30):
            tokens = np.arange(round_, round_ + 256 * 4, dtype=np.uint32)
            await worker.store(tokens, list(range(64)))
            await worker.retrieve(tokens, list(range(64, 128)))
            if number == 0 and round_ == 2:
                _ready()

    await asyncio.gather(*(go_on(number) for number in range(TRANSFERS)))


async def stuck_release(url: str) -> None:
    """Leave one release behind that never ends."""
    worker = _worker(url, {"kv": _tensor(STUCK_CLOSE)}, "stuck")
    await worker.__aenter__()
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(3.0)  # it is reported as stuck by then
    _ready()
    await closing
    await asyncio.Event().wait()


async def rich_deaths(url: str) -> None:
    """Let workers with a thousand mappings, and schedulers with a thousand leases, die one after the other."""
    while True:
        command = [sys.executable, __file__, "rich", url]
        rich = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        if rich.stdout is not None:
            await rich.stdout.readline()
        rich.kill()
        await rich.wait()
        _ready()


async def be_rich(url: str) -> None:
    """Hold a thousand mappings and as many leases."""
    cache = {f"plane.{n}": lmlive.shared_empty((512, 8), "int64") for n in range(MAPPINGS)}
    tokens = np.arange(256 * 16, dtype=np.uint32)
    worker = _worker(url, dict(cache), "rich", request_timeout=30.0)
    scheduler = lmlive.Scheduler(url, model="rich", config=lmlive.WorkerConfig(lookup_timeout=10.0))
    await worker.__aenter__()
    await scheduler.__aenter__()
    await worker.store(tokens, list(range(256)))
    for _ in range(LEASES):
        await scheduler.lookup(tokens)
    _ready()
    await asyncio.Event().wait()


async def joining(url: str) -> None:
    """Let a thousand workers join at once, leave at once, and join again."""
    tether = f"{url.removeprefix('ipc://')}.tether"
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 2 * JOINING)

    async def join() -> tuple[zmq.asyncio.Socket, socket.socket, bytes]:
        secret, instance_id = os.urandom(16), secrets.randbits(62) + 1
        loop = asyncio.get_running_loop()
        tie = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        tie.setblocking(False)
        await loop.sock_connect(tie, tether)
        await loop.sock_recv(tie, MAX_PACKET_BYTES)
        tie.send(Offer(secret, instance_id, Role.WORKER, 0, 0).encode())
        await loop.sock_recv(tie, MAX_PACKET_BYTES)
        peer = context.socket(zmq.DEALER)
        peer.linger = 0
        peer.connect(url)
        await peer.send(encode_request(Verb.HELLO, 1, [1, 1, int(Role.WORKER), "load", secret]))
        payload: list[object] = [secret, "join", "", 0, 1, "", "", "none", "auto", [], []]
        await peer.send(encode_request(Verb.REGISTER, 2, payload, instance_id=instance_id))
        for _ in range(2):
            header = decode_header(await peer.recv())
            if header.code:
                raise RuntimeError(f"refused with status {header.code}")
        return peer, tie, secret

    async def leave(peer: zmq.asyncio.Socket, tie: socket.socket, secret: bytes) -> None:
        await peer.send(encode_request(Verb.UNREGISTER, 3, [secret]))
        if decode_header(await peer.recv()).code:
            raise RuntimeError("not unregistered")
        peer.close(0)
        tie.close()

    while True:
        joined = await asyncio.gather(*(join() for _ in range(JOINING)))
        await asyncio.gather(*(leave(*one) for one in joined))
        _ready()


LOADS: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    "a REGISTER of 60 s in each thread": slow_register,
    "all transfer threads busy": transfers,
    "a release that is stuck": stuck_release,
    "deaths of workers with 1,024 mappings and 1,000 leases": rich_deaths,
    "1,000 workers that join at once": joining,
}


def _ready() -> None:
    """Say so; again and again where the load begins anew, for nobody reads more than the first."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    asyncio.run({**LOADS, "rich": be_rich}[sys.argv[1]](sys.argv[2]))  # type: ignore[arg-type]
