"""Real redis-servers for a test: one, or a cluster of three, on free ports, in a directory of their own."""

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import valkey

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
PATIENCE = 15.0

need_redis = pytest.mark.skipif(PROGRAM is None, reason="no redis-server here: apt-get install redis-server")


class RedisServer:
    """One server process; it holds nothing on a disk."""

    def __init__(self, folder: Path, *flags: str, port: int = 0) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAM is not None
        fixed = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "")
        quiet = ("--appendonly", "no", "--logfile", str(self.folder / f"{self.port}.log"))
        self.process = subprocess.Popen([PROGRAM, *fixed, *quiet, *self._flags], stdout=subprocess.DEVNULL)
        self.wait_until_it_answers()

    def client(self) -> Any:
        return valkey.Valkey(host="127.0.0.1", port=self.port, socket_timeout=5.0)

    def wait_until_it_answers(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                with contextlib.closing(self.client()) as client:
                    client.ping()
                return
            except valkey.exceptions.AuthenticationError:
                return
            except (OSError, valkey.exceptions.ValkeyError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)  # it tells nobody when it listens

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextlib.contextmanager
def redis_server(*flags: str, port: int = 0) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="lmlive-redis-") as folder:
        server = RedisServer(Path(folder), *flags, port=port)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def redis_cluster(nodes: int = 3) -> Iterator[list[RedisServer]]:
    """Start primaries that share all slots."""
    with contextlib.ExitStack() as stack:
        servers = []
        for _ in range(nodes):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmlive-redis-")))
            node = RedisServer(folder, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            stack.callback(node.kill)
            node.start()
            servers.append(node)
        _join(servers)
        yield servers


def _join(servers: list[RedisServer]) -> None:
    share = -(-16384 // len(servers))
    for number, server in enumerate(servers):
        with contextlib.closing(server.client()) as client:
            last = min((number + 1) * share, 16384) - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            for other in servers[:number]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
    end = time.monotonic() + PATIENCE
    for server in servers:
        with contextlib.closing(server.client()) as client:
            while not _is_whole(client, len(servers)):
                assert time.monotonic() < end, "the cluster never came together"
                time.sleep(0.05)  # nobody tells when it has


def _is_whole(client: Any, nodes: int) -> bool:
    told = client.execute_command("CLUSTER INFO")
    facts = told if isinstance(told, dict) else dict(line.split(":") for line in told.decode().split())
    return facts["cluster_state"] == "ok" and int(facts["cluster_known_nodes"]) == nodes


def free_port() -> int:
    """Find a port that is free, and so is the one that its cluster bus would take."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port + 10_000 > 65_535:
                continue
            try:
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
