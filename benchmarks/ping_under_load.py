"""How long does a PING take while the server has other things to do?

One peer, connected before the load begins, PINGs at a steady pace, as the heartbeats of a host's workers do together,
and every answer goes through the server's normal lane. What a stranger waits who comes while the load runs, from its
connect to its first answer, is a row of its own.

Beside an idle server and a bare echo, five loads, one after the other and all at once: the ones that made other servers
miss their heartbeats. Each load is a process of its own, on the same cores as all the rest.
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
from typing import Self

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


class Pinger:
    """A peer that is connected.

    Args:
        server: Whom it asks.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._context = zmq.Context()
        self._peer = self._context.socket(zmq.DEALER)
        self._peer.linger = 0
        self._peer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        self._peer.connect(server.url)
        self.came_after = self.ping()
        """Milliseconds from the connect to the first answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peer.close()
        self._context.term()

    def ping(self) -> float:
        """Give the milliseconds that one PING takes."""
        sent = time.perf_counter()
        self._peer.send(self._server.request)
        reply = self._peer.recv()
        if decode_header(reply)[1:3] not in ANSWERS:
            raise RuntimeError("the PING was refused")
        return (time.perf_counter() - sent) * 1e3

    def measure(self, seconds: float) -> Floats:
        """PING at a steady pace; give the round trips in milliseconds, of the late ones from when they were due."""
        trips = []
        due = time.perf_counter()
        end = due + seconds
        while due < end:
            time.sleep(max(0.0, due - time.perf_counter()))
            trips.append(self.ping())
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


def rows(name: str, pinger: Pinger, seconds: float, *, goals: bool) -> list[Row]:
    """Measure and give the figures of one load."""
    trips = pinger.measure(seconds)
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
    with bare_echo() as echo, Pinger(echo) as pinger:
        found += rows("a bare echo", pinger, seconds, goals=False)
    with slow_server() as server, Pinger(server) as pinger:
        found += rows("idle", pinger, seconds, goals=True)
    for name in LOADS:
        with slow_server() as server, Pinger(server) as pinger, load(name, server.url):
            found += rows(name, pinger, seconds, goals=True)
    with slow_server() as server, Pinger(server) as pinger, contextlib.ExitStack() as stack:
        for name in LOADS:
            if "REGISTER" not in name:  # with all threads of that lane taken, nobody else could bring memory
                stack.enter_context(load(name, server.url))
        stack.enter_context(load(next(iter(LOADS)), server.url))
        found += rows("all of them at once", pinger, seconds, goals=True)
        with Pinger(server) as stranger:
            note = "from its connect to its first answer"
            found.append(Row("all of them at once: a stranger comes", stranger.came_after, "ms", note=note))
    report(found, as_json=chosen.json)


if __name__ == "__main__":
    main()
