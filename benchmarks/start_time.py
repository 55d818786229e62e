"""How long until a new server answers, and what do it and the import weigh?

Each figure is a median over fresh processes. Beside the server stands bare Python, and a bare Python ROUTER that
binds and answers one request: what nobody who uses Python and ZeroMQ can beat.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq
from _common import Row, arguments, report

from lmlive.protocol.codec import encode_request
from lmlive.protocol.verbs import Verb

START_GOAL_MS = 500.0
IMPORT_GOAL_MS = 80.0
RSS_GOAL_MIB = 60.0
POOL_MIB = 16
BARE_ROUTER = """
import sys, zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
peer, body = socket.recv_multipart()
socket.send_multipart([peer, body])
socket.close(200)
"""


def seconds_of(*arguments: str) -> float:
    """Time one run of ``python ARGUMENTS``."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True)
    return time.perf_counter() - begin


def seconds_to_answer(command: list[str], url: str) -> tuple[float, float]:
    """Start a process; give the seconds until its first answer and its resident MiB without the pool."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 1)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1)
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        socket.connect(url)
        socket.send(encode_request(Verb.PING, 1, [None]))
        if not socket.poll(30_000):
            raise TimeoutError(f"{command} did not answer")
        seconds = time.perf_counter() - begin
        status = Path(f"/proc/{process.pid}/status").read_text()
        # Shared memory is the pool, populated at the start; the goal is about all else.
        resident = sum(int(kib) for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+)", status)) / 1024
    finally:
        process.kill()
        process.wait()
        socket.close()
        context.term()
    return seconds, resident


def main() -> None:
    """Measure and print."""
    parser = arguments("How long until a new server answers, and what do it and the import weigh?")
    parser.add_argument("--rounds", type=int, default=9, help="medians are over so many (default 9)")
    chosen = parser.parse_args()
    bare, imported, routers, servers, resident = [], [], [], [], []
    for _ in range(chosen.rounds):
        bare.append(seconds_of("-c", "pass"))
        imported.append(seconds_of("-c", "import lmlive"))
        with tempfile.TemporaryDirectory(prefix="lmlive-") as folder:
            url = f"ipc://{folder}/bare.sock"
            routers.append(seconds_to_answer([sys.executable, "-c", BARE_ROUTER, url], url)[0])
            run_dir = os.path.join(folder, "run")  # noqa: PTH118 - goes into a command
            command = [sys.executable, "-m", "lmlive.server", "--run-dir", run_dir, "--pool-bytes", f"{POOL_MIB}MiB"]
            seconds, mib = seconds_to_answer(command, f"ipc://{run_dir}/router.sock")
            servers.append(seconds)
            resident.append(mib)
    middle = statistics.median
    over = (middle(imported) - middle(bare)) * 1e3
    rows = [
        Row("start to first PING answered", middle(servers) * 1e3, "ms", START_GOAL_MS),
        Row("the same, bare Python ROUTER", middle(routers) * 1e3, "ms"),
        Row("bare Python", middle(bare) * 1e3, "ms"),
        Row("import lmlive over bare Python", over, "ms", IMPORT_GOAL_MS),
        Row("resident without the pool", middle(resident), "MiB", RSS_GOAL_MIB, note="at the first PING answered"),
    ]
    report(rows, as_json=chosen.json)


if __name__ == "__main__":
    main()
