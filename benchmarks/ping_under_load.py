"""How long does a PING take while the server has other things to do?

One peer PINGs at a steady pace, as the heartbeats of a host's workers do together, and every answer goes through the
server's normal lane. Beside an idle server and a bare echo, five loads, one after the other and all at once: the ones
that made other servers miss their heartbeats. Each load is a process of its own, on the same cores as all the rest.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq
from _common import Row, arguments, report
from _loads import LOADS
from _pings import Server, bare_echo, registered_ping

from lmlive.protocol.codec import REPLY, REQUEST, decode_header
from lmlive.protocol.verbs import Verb

P99_GOAL_MS = 5.0
BUSY_GOAL_MS = 50.0
LONGEST_GOAL_MS = 1000.0
SPACING = 0.002
PATIENCE_MS = 10_000
READY_SECONDS = 90.0
ANSWERS = ((REPLY, 0), (REQUEST, Verb.PING))  # kind and code; the echo's is the request itself

Floats = npt.NDArray[np.float64]


def ping(server: Server, seconds: float) -> Floats:
    """PING at a steady pace; give the round trips in milliseconds, of the late ones from when they were due."""
    trips = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        peer.connect(server.url)
        due = time.perf_counter()
        end = due + seconds
        while due < end:
            time.sleep(max(0.0, due - time.perf_counter()))
            sent = time.perf_counter()
            peer.send(server.request)
            reply = peer.recv()
            trips.append((time.perf_counter() - sent) * 1e3)
            if decode_header(reply)[1:3] not in ANSWERS:
                raise RuntimeError("the PING was refused")
            # A late answer delays the next PINGs; they count as well, from when they were due.
            late = time.perf_counter() - due - SPACING
            trips += [(late - missed * SPACING) * 1e3 for missed in range(int(max(0.0, late) / SPACING))]
            due = max(due + SPACING, time.perf_counter())
    return np.array(trips)


@contextlib.contextmanager
def slow_server() -> Iterator[Server]:
    """Run the server whose memory may be slow."""
    with tempfile.TemporaryDirectory(prefix="lm-") as folder, (Path(folder) / "log").open("wb") as log:
        command = [sys.executable, str(Path(__file__).with_name("_loads.py")), "serve", "--run-dir", f"{folder}/run"]
        with _process([*command, "--pool-bytes", "512MiB"], log=log.fileno()) as process:
            url = f"ipc://{folder}/run/router.sock"
            yield Server(url, process.pid, registered_ping(url))


@contextlib.contextmanager
def load(name: str, url: str) -> Iterator[None]:
    """Run a load."""
    with _process([sys.executable, str(Path(__file__).with_name("_loads.py")), name, url]):
        yield


@contextlib.contextmanager
def _process(command: Sequence[str], log: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    alarm = threading.Timer(READY_SECONDS, process.kill)
    alarm.start()
    try:
        if process.stdout is None or "ready" not in process.stdout.readline():
            raise RuntimeError(f"{' '.join(command[2:4])} did not get ready")
        alarm.cancel()
        yield process
    finally:
        alarm.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def rows(name: str, trips: Floats, *, goals: bool) -> list[Row]:
    """Give the figures of one load."""
    middle, late, longest = np.percentile(trips, [50, 99, 100])
    note = f"p50 {middle:.2f} ms of {len(trips):,}; {P99_GOAL_MS:g} ms where cores are free"
    return [
        Row(f"{name}: p99", float(late), "ms", BUSY_GOAL_MS if goals else None, note=note),
        Row(f"{name}: longest", float(longest), "ms", LONGEST_GOAL_MS if goals else None),
    ]


def main() -> None:
    """Measure and print."""
    parser = arguments("How long does a PING take while the server has other things to do?")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load (default 10)")
    seconds = (chosen := parser.parse_args()).seconds
    found: list[Row] = []
    with bare_echo() as echo:
        found += rows("a bare echo", ping(echo, seconds), goals=False)
    with slow_server() as server:
        found += rows("idle", ping(server, seconds), goals=True)
    for name in LOADS:
        with slow_server() as server, load(name, server.url):
            found += rows(name, ping(server, seconds), goals=True)
    with slow_server() as server, contextlib.ExitStack() as stack:
        for name in LOADS:
            if "REGISTER" not in name:  # with all threads of that lane taken, nobody else could bring memory
                stack.enter_context(load(name, server.url))
        stack.enter_context(load(next(iter(LOADS)), server.url))
        found += rows("all of them at once", ping(server, seconds), goals=True)
    report(found, as_json=chosen.json)


if __name__ == "__main__":
    main()
