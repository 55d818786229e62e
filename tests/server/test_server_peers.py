import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lmlive.config import ServerConfig
from lmlive.errors import (
    InvalidPayload,
    MessageTooLarge,
    NotOwner,
    StaleEpoch,
    StaleGeneration,
    UnknownInstance,
    UnknownVerb,
    VersionError,
)
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.protocol.codec import encode_reply, encode_request
from lmlive.protocol.messages import parse_error
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.testing.device import RecordingBackend
from tests.conftest import eventually
from tests.server.raw import BLOCK_BYTES, SECRET, Raw, Tie, bare, maps, memory_file, register

WRONG: list[list[object]] = [[1] * 30, [[[]]]]


def config(run_dir: Path, **settings: Any) -> ServerConfig:
    return ServerConfig(run_dir=run_dir, **({"pool_bytes": "2MiB"} | settings))


# Bad input


async def everything_bad(raw: Raw, epoch: int, *, over_tcp: bool) -> None:
    request = encode_request(Verb.STATUS, 1, [])
    for frames in ([b""], [b"GET / HTTP/1.1\r\n\r\n"], [request[:47]], [b"", request], [os.urandom(200)]):
        await raw.send(*frames)
        assert await raw.silent()
    await raw.send(encode_reply(1, epoch, 0, 0, []))
    assert await raw.silent()
    for verb in (0, 77, 65_535):
        assert isinstance(await raw.error(verb, []), UnknownVerb)
    for verb in Verb:
        refusal = NotOwner if over_tcp and verb in (Verb.REAP, Verb.CLEAR) else InvalidPayload
        for payload in WRONG:
            assert isinstance(await raw.error(verb, payload), refusal)
    await raw.send(request[:48] + b"\xc1")
    reply, body = await raw.receive()
    assert isinstance(parse_error(reply.code, body), InvalidPayload)
    await raw.send(request[:4] + b"\x09" + request[5:])
    reply, body = await raw.receive()
    assert isinstance(parse_error(reply.code, body), VersionError)
    await raw.send(request, *[b"x"] * 99)
    reply, body = await raw.receive()
    assert isinstance(parse_error(reply.code, body), InvalidPayload)
    await raw.send(request + bytes(1 << 20))
    reply, body = await raw.receive()
    assert isinstance(parse_error(reply.code, body), MessageTooLarge)


@pytest.mark.parametrize("bind", [(), "tcp://127.0.0.1:0"])
async def test_whatever_comes_it_goes_on_and_answers(run_dir: Path, bind: Any) -> None:
    async with LivenessServer(config(run_dir, bind=bind)) as server, Raw(server.url) as raw:
        await everything_bad(raw, server.epoch, over_tcp=bool(bind))
        status = await raw.status()
        assert status["wire"]["bad_frames"] == 6
        assert status["wire"]["errors"]["UnknownVerb"] == 3
        assert "InternalError" not in status["wire"]["errors"]
        assert status["wire"]["dropped_replies"] == 0


async def test_strangers_protocols_are_counted(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir, bind="tcp://127.0.0.1:0")) as server, Raw(server.url) as raw:
        host, port = server.url.removeprefix("tcp://").split(":")
        for opening in (
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        ):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(opening)
            await writer.drain()
            writer.close()
        await eventually(lambda: server.status().wire.handshake_failures >= 1)
        assert await raw.silent()


# Registration over sockets


async def test_a_worker_registers_with_memory_and_unregisters(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server, Raw(server.url) as raw, Tie(server.url) as tie:
        fd = memory_file("lmlive-test-a", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        reply, body = await raw.ask(Verb.REGISTER, register(), instance_id=7)
        assert (reply.code, reply.generation, len(body[1])) == (0, 1, 32)
        status = await raw.status()
        [instance] = status["instances"]
        assert instance["mapped_bytes"] == 4 * BLOCK_BYTES
        assert (instance["pid"], instance["evidence"], instance["state"]) == (os.getpid(), "process", "active")
        await tie.offer(fd)
        again, _ = await raw.ask(Verb.REGISTER, register(), instance_id=7)
        assert again.generation == 1
        os.close(fd)
        assert "lmlive-test-a" in maps()
        assert await raw.result(Verb.UNREGISTER, [SECRET], instance_id=7) == [True]
        assert "lmlive-test-a" not in maps()
        assert (await raw.status())["releases"] == {"pending": 0, "done": 1, "by_exit": 0, "stuck": 0}


async def test_two_equal_registers_are_joined_and_answered_alike(run_dir: Path) -> None:
    backend = RecordingBackend()
    gate = backend.gate("open")
    async with (
        LivenessServer(config(run_dir), backend=backend) as server,
        Raw(server.url) as raw,
        Tie(server.url) as tie,
    ):
        fd = memory_file("lmlive-test", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        os.close(fd)
        frames = [encode_request(Verb.REGISTER, number, register(), instance_id=7) for number in (101, 102)]
        await raw.send(frames[0])
        await eventually(lambda: gate.waiting == 1)
        await raw.send(frames[1])
        assert await raw.silent()
        gate.open()
        first, second = await raw.receive(), await raw.receive()
        assert first[1] == second[1]
        assert (first[0].generation, second[0].generation) == (1, 1)
        assert backend.opened == 1


async def test_the_fence_over_sockets(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server, Raw(server.url) as raw, Raw(server.url) as other:
        store: list[object] = [b"k" * 32, [], 0, bytes(16)]
        await raw.hello()
        await raw.result(Verb.REGISTER, bare(), instance_id=7)
        mine = {"epoch": server.epoch, "instance_id": 7, "generation": 1}
        assert isinstance(await other.error(Verb.STORE, store, **mine), StaleEpoch)
        await other.hello(b"o" * 16)
        assert isinstance(await other.error(Verb.STORE, store, **mine), NotOwner)
        assert isinstance(await other.error(Verb.REGISTER, bare(b"o" * 16), instance_id=7), NotOwner)
        assert isinstance(await other.error(Verb.UNREGISTER, [b"o" * 16], instance_id=7), NotOwner)
        assert isinstance(await raw.error(Verb.STORE, store, **mine | {"epoch": 1}), StaleEpoch)
        assert isinstance(await raw.error(Verb.STORE, store, **mine | {"generation": 0}), StaleGeneration)
        assert isinstance(await raw.error(Verb.STORE, store, **mine | {"instance_id": 8}), UnknownInstance)


async def test_a_silent_worker_in_this_process_is_reaped_without_a_hold(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMLIVE_ALLOW_SHORT_TIMEOUTS", "1")
    settings = config(
        run_dir,
        worker_reap_timeout_seconds=0.4,
        worker_registration_grace_seconds=600,
        worker_alive_hold_seconds=0,
    )
    async with LivenessServer(settings) as server, Raw(server.url) as raw:
        await raw.hello()
        await raw.result(Verb.REGISTER, bare(), instance_id=7)
        await raw.result(Verb.REGISTER, bare(b"t" * 16), instance_id=8)
        assert await raw.result(Verb.PING, [7], instance_id=7, epoch=server.epoch, generation=1) == [True]
        await eventually(lambda: server.status().liveness.reaps.silence == 1)
        reply, body = await raw.ask(Verb.PING, [7], instance_id=7, epoch=server.epoch, generation=1)
        assert (reply.generation, body) == (0, [True])
        status = server.status()
        assert [instance.instance_id for instance in status.instances] == ["8"]
        assert status.liveness.last_scan_age_seconds is not None
        kinds = [event["kind"] for event in await raw.events()]
        assert kinds == ["registered", "registered", "suspect", "reaped"]


async def test_an_embedders_target_is_part_of_it(run_dir: Path) -> None:
    class Target(InstanceLivenessTarget):
        def __init__(self) -> None:
            self.dropped: list[int] = []

        def drop_instance_state(self, instance_id: int) -> None:
            self.dropped.append(instance_id)

    target = Target()
    async with LivenessServer(config(run_dir), targets=[target]) as server, Raw(server.url) as raw:
        await raw.result(Verb.REGISTER, bare(), instance_id=7)
        assert await raw.result(Verb.REAP, [7, None]) == [True]
        assert target.dropped == [7]


WORKER = """
import array, os, socket, sys, time
sys.path[:0] = {path!r}
from tests.server.raw import SECRET, memory_file, register
from lmlive.protocol.tether import Offer
from lmlive.protocol.codec import decode_header, encode_request
import zmq
sock = zmq.Context().socket(zmq.DEALER)
sock.connect({url!r})
tie = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
tie.connect({url!r}.removeprefix("ipc://") + ".tether")
tie.recv(1000)
fd = memory_file("lmlive-victim", 4 * 4096)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
tie.sendmsg([Offer(SECRET, 7, 1, 0, 1).encode()], rights)
tie.recv(1000)
sock.send(encode_request(3, 1, register(), instance_id=7))
print(decode_header(sock.recv()).code, flush=True)
time.sleep(60)
"""


async def test_a_killed_worker_is_reaped_and_its_memory_is_gone_from_here(run_dir: Path) -> None:
    async with LivenessServer(config(run_dir)) as server, Raw(server.url) as raw:
        text = WORKER.format(path=sys.path, url=server.url)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 10) == b"0\n"
        assert "lmlive-victim" in maps()
        [instance] = (await raw.status())["instances"]
        assert instance["pid"] == process.pid
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        await eventually(lambda: server.status().releases.done == 1)
        assert "lmlive-victim" not in maps()
        status = await raw.status()
        assert status["instances"] == []
        assert status["liveness"]["reaps"]["exit"] == 1
        assert [(event["kind"], event.get("reason")) for event in await raw.events()][-2:] == [
            ("reaped", "exit"),
            ("released", None),
        ]


async def test_over_tcp_it_says_that_there_are_no_keys_and_serves_no_reap(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bind = (f"ipc://{run_dir}/router.sock", "tcp://127.0.0.1:0")
    async with LivenessServer(config(run_dir, bind=bind)) as server:
        assert "tcp without keys" in caplog.text
        unix, tcp = server.urls
        async with Raw(unix) as near, Raw(tcp) as far:
            await near.result(Verb.REGISTER, bare(), instance_id=7)
            assert isinstance(await far.error(Verb.REAP, [7, None]), NotOwner)
            assert isinstance(await far.error(Verb.CLEAR, [None]), NotOwner)
            assert (await far.status())["liveness"]["tracked_instances"] == 1
            assert await near.result(Verb.REAP, [7, None]) == [True]
