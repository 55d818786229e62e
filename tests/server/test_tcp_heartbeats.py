"""ZeroMQ's own heartbeats: a peer over TCP that stopped is cut off, one at a unix socket is not."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
import zmq

from lmlive.server import sockets
from lmlive.worker import dealer
from lmlive.worker.dealer import Context, open_dealer
from tests.conftest import eventually
from tests.server.routers import TCP, answering

PEERS = """
import sys, zmq
context = zmq.Context()
peers = []
for url in sys.argv[1:]:
    peer = context.socket(zmq.DEALER)
    peer.connect(url)
    peer.send(b"here")
    peer.recv()
    peers.append(peer)
print("in", flush=True)
sys.stdin.read()
"""


async def test_of_a_stopped_process_the_server_cuts_off_tcp_alone(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "TCP_BEAT_MS", 200)
    monkeypatch.setattr(sockets, "TCP_DEAD_MS", 400)
    # What one bind is given is neither missing at the next one nor left over from the last.
    async with answering(TCP, f"ipc://{run_dir}/router.sock", TCP, run_dir=run_dir) as desk:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PEERS,
            *desk.router.urls,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"in\n"
            assert desk.router.connections == 3
            process.send_signal(signal.SIGSTOP)
            await eventually(lambda: desk.router.connections == 1)
            await asyncio.sleep(0.6)  # as long again: what would have been cut off as well is cut off by now
            assert desk.router.connections == 1
            assert not desk.router.handshake_failures
            process.send_signal(signal.SIGCONT)
            await eventually(lambda: desk.router.connections == 3)  # its library connects again
        finally:
            process.kill()
            await process.communicate()
        await eventually(lambda: desk.router.connections == 0)


def test_a_cut_without_a_word_is_over_within_two_beats() -> None:
    for side in (sockets, dealer):
        assert side.TCP_BEAT_MS + side.TCP_DEAD_MS <= 20_000


@pytest.mark.parametrize(("url", "beat"), [("tcp://127.0.0.1:1", dealer.TCP_BEAT_MS), ("ipc:///nowhere/x.sock", 0)])
def test_a_worker_sends_them_over_tcp_alone(url: str, beat: int) -> None:
    context: Context = zmq.Context()
    sock, monitor = open_dealer(context, url, connect_timeout=1.0)
    assert sock.getsockopt(zmq.HEARTBEAT_IVL) == beat
    sock.close(0)
    monitor.close(0)
    context.term()
