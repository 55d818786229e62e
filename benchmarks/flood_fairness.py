"""What do a flooding client's neighbours feel: the server's own timers, and a polite client's PINGs?

The server is embedded in a process with a 10 ms ticker beside it on the same loop. Flooding clients send PINGs as fast
as their sockets take them; a polite one keeps a single PING in flight. The figures without a flood stand beside.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _common import Row, arguments, report
from _pings import Load, Server, load, registered_ping

from lmlive.config import ServerConfig
from lmlive.server.server import LivenessServer

TICK = 0.01
TICK_GOAL_MS = 50.0
PING_GOAL_MS = 50.0

FLOOD = """
import sys, zmq
peer = zmq.Context().socket(zmq.DEALER)
peer.linger = 0
peer.connect(sys.argv[1])
frame = bytes.fromhex(sys.argv[2])
print("ready", flush=True)
while True:
    try:
        for _ in range(64):
            peer.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        peer.poll(10, zmq.POLLOUT)
    try:
        while True:
            peer.recv(zmq.NOBLOCK)
    except zmq.Again:
        pass
"""


async def tick(delays: list[float]) -> None:
    """Note how late each tick of a 10 ms ticker is."""
    loop = asyncio.get_running_loop()
    due = loop.time() + TICK
    while True:
        await asyncio.sleep(max(0.0, due - loop.time()))
        late = loop.time() - due
        delays.append(late)
        due += TICK * (1 + late // TICK)


async def serve() -> None:
    """Run the server and the ticker; each line on stdin asks for the worst delay since the last one."""
    # What ``python -m lmlive.server`` does: a thread that holds the GIL gives it up after half a millisecond.
    sys.setswitchinterval(0.0005)
    delays: list[float] = []
    with tempfile.TemporaryDirectory(prefix="lm-") as folder:
        async with LivenessServer(ServerConfig(run_dir=folder, pool_bytes="16MiB", environ={})) as server:
            ticker = asyncio.create_task(tick(delays))
            reader = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
            )
            print(server.url, flush=True)
            while await reader.readline():
                wire: Any = server.status().to_dict()["wire"]
                print(max(delays, default=0.0), wire["frames"], flush=True)
                delays.clear()
            ticker.cancel()


def measure(server: Server, ask: Callable[[], tuple[float, int]], seconds: float) -> tuple[float, int, float, Load]:
    """Give the worst tick, the messages, the time and what the polite client measured."""
    ask()
    begin = time.perf_counter()
    polite = load(server, 1, 1, seconds)
    took = time.perf_counter() - begin
    worst, frames = ask()
    return worst, frames, took, polite


def main() -> None:
    """Measure and report."""
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="be the server; used by the benchmark itself")
    parser.add_argument("--floods", type=int, default=1, help="flooding clients")
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    floods: list[subprocess.Popen[bytes]] = []
    try:
        if process.stdout is None or process.stdin is None:
            raise RuntimeError("the server has no pipes")
        answers, questions = process.stdout, process.stdin

        def ask() -> tuple[float, int]:
            questions.write("\n")
            questions.flush()
            worst, frames = answers.readline().split()
            return float(worst), int(frames)

        url = answers.readline().strip()
        server = Server(url, process.pid, registered_ping(url))
        quiet = measure(server, ask, options.seconds)
        floods += [
            subprocess.Popen([sys.executable, "-c", FLOOD, url, server.request.hex()], stdout=subprocess.PIPE)
            for _ in range(options.floods)
        ]
        for flood in floods:
            if flood.stdout is not None:
                flood.stdout.readline()
        before = ask()[1]
        loud = measure(server, ask, options.seconds)
    finally:
        for child in floods:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        process.kill()
        process.communicate()
    rows = []
    for name, (worst, _, _, polite) in (("no flood", quiet), ("flood", loud)):
        goal = name == "flood"
        rows += [
            Row(f"{name}, worst delay of a 10 ms ticker", worst * 1e3, "ms", TICK_GOAL_MS if goal else None),
            Row(f"{name}, PING p50 of a polite client", polite.at(0.5) / 1e3, "ms"),
            Row(f"{name}, PING p99 of a polite client", polite.at(0.99) / 1e3, "ms", PING_GOAL_MS if goal else None),
        ]
    rows.append(Row("flood, messages", (loud[1] - before) / loud[2], "1/s"))
    report(rows, as_json=options.json)


if __name__ == "__main__":
    main()
