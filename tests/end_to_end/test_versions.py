"""N and N-1 work together, in both directions; whoever has no version in common is told so, loudly, wherever it is.

There is one version today. So the server, in its own process, and the workers, in this one, are made to speak more.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmlive
from lmlive.errors import VersionError
from lmlive.protocol import versions
from lmlive.protocol.codec import decode_header, encode_request
from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from lmlive.worker.blocking import BlockingWorker
from tests.conftest import eventually
from tests.end_to_end.scene import CHUNK, PER_CHUNK, plain, prompt
from tests.end_to_end.versioned import server
from tests.server.raw import Raw

Range = tuple[int, int]
RANGES: list[Range] = [(1, 1), (1, 2), (2, 3)]
TOKENS = prompt(CHUNK)
CONFIG = lmlive.WorkerConfig(heartbeat_interval=0.1, heartbeat_start="register", request_timeout=10.0, strict=True)
LOOKS_LONG = lmlive.WorkerConfig(lookup_timeout=10.0)


@contextlib.contextmanager
def speaking(spoken: Range) -> Iterator[None]:
    """Let whatever is in this process speak these versions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "SPOKEN", versions.Versions(*spoken))
        yield


def ask_by_command(url: str, spoken: Range) -> tuple[int, str]:
    """Run ``lmlive ping`` as a program that speaks these versions."""
    code = (
        "import sys; from lmlive.protocol import versions; from lmlive.cli import main; "
        f"versions.SPOKEN = versions.Versions{spoken}; sys.exit(main(['ping', '--url', {url!r}, '--timeout', '10']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env={**os.environ})
    return done.returncode, done.stderr


async def everything_works(url: str) -> None:
    cache = plain(seed=1)
    here, there = list(range(PER_CHUNK)), list(range(20, 20 + PER_CHUNK))
    async with (
        cache.worker(url, config=CONFIG) as worker,
        lmlive.Scheduler(url, model="m", config=LOOKS_LONG) as scheduler,
    ):
        assert await worker.ping()
        assert (await worker.store(TOKENS, here)).reason in ("stored", "present")
        found = await scheduler.lookup(TOKENS)
        assert found.tokens == CHUNK
        assert await scheduler.release(found.lease)
        assert (await worker.retrieve(TOKENS, there)).reason == "loaded"
        assert worker.healthy


async def nobody_comes_in(url: str, servers: Range, ours: Range) -> None:
    ranges = {"server_min": servers[0], "server_max": servers[1], "peer_min": ours[0], "peer_max": ours[1]}
    for made in (
        lambda: plain().worker(url, config=CONFIG),
        lambda: lmlive.Worker(url, kv_caches={}, model="m", config=CONFIG),
        lambda: lmlive.Scheduler(url, model="m"),
    ):
        with pytest.raises(VersionError) as caught:
            async with made():
                pass
        assert caught.value.fields == ranges


@pytest.mark.may_block
@pytest.mark.parametrize("servers", RANGES)
async def test_neighbours_work_together_and_others_are_told(run_dir: Path, servers: Range) -> None:
    async with server(run_dir, servers) as process:
        for ours in RANGES:
            with speaking(ours):
                if max(servers[0], ours[0]) <= min(servers[1], ours[1]):
                    await everything_works(process.url)
                else:
                    await nobody_comes_in(process.url, servers, ours)
        await speaks_each_of_its_versions(process, servers)


async def speaks_each_of_its_versions(process: ServerProcess, servers: Range) -> None:
    """A server of several versions serves all of them, on one connection too."""
    async with Raw(process.url) as raw:
        for version in range(servers[0] - 1, servers[1] + 2):
            await raw.send(encode_request(Verb.PING, 1, [None], version=version))
            reply, _ = await raw.receive()
            if servers[0] <= version <= servers[1]:
                assert (reply.code, reply.version) == (0, version)
            else:
                assert (reply.code, reply.version) == (VersionError.code, max(1, min(version, servers[1])))


@pytest.mark.may_block
async def test_the_command_and_the_blocking_worker_say_it_too(run_dir: Path) -> None:
    async with server(run_dir, (2, 3)) as process:
        status, said = ask_by_command(process.url, (1, 1))
        assert status == 1
        assert "VersionError" in said
        assert "this side speaks 2 to 3, the peer 1 to 1: upgrade the older side" in said
        assert said.count("\n") == 1
        with pytest.raises(VersionError), BlockingWorker(process.url, kv_caches={}, model="m"):
            pass
        assert ask_by_command(process.url, (1, 2)) == (0, "")


@pytest.mark.may_block
async def test_a_server_that_is_replaced_by_an_older_or_a_newer_one_is_met_again(run_dir: Path) -> None:
    with speaking((1, 2)):
        async with server(run_dir, (1, 2)) as first:
            worker = await plain(seed=1).worker(first.url, config=CONFIG).__aenter__()
            first.kill()
            await first.wait()
        for later in ((1, 1), (2, 3)):
            async with server(run_dir, later) as process:
                await eventually(lambda: worker.healthy and worker.generation, within=10)
                assert await worker.ping()
                assert (await worker.store(TOKENS, list(range(PER_CHUNK)))).reason == "stored"
                process.kill()
                await process.wait()
                await eventually(lambda: not worker.healthy, within=10)
        async with server(run_dir, (3, 4)) as stranger:
            await eventually(lambda: worker.stats().get("failed_registrations"), within=10)
            assert not worker.healthy
            stranger.kill()
            await stranger.wait()
        async with server(run_dir, (2, 2)):
            await eventually(lambda: worker.healthy, within=10)
            await worker.close()


async def test_a_stranger_of_another_version_over_tcp_reads_its_error(run_dir: Path) -> None:
    config = lmlive.ServerConfig(run_dir=run_dir, bind="tcp://127.0.0.1:0", pool_bytes="1MiB")
    async with lmlive.LivenessServer(config) as running, Raw(running.url) as raw:
        for version in (2, 255):
            hello: list[object] = [version, version, 1, "x", bytes(16)]
            asked: list[tuple[int, list[object]]] = [(Verb.HELLO, hello), (Verb.PING, [None]), (99, [])]
            for verb, payload in asked:
                frame = encode_request(verb, 5, payload, version=version)
                assert decode_header(frame).version == version
                await raw.send(frame)
                reply, [_, fields] = await raw.receive()
                assert (reply.code, reply.version, reply.request_id) == (VersionError.code, 1, 5)
                assert fields == {"server_min": 1, "server_max": 1, "peer_min": version, "peer_max": version}
        assert running.status().wire.errors == {"VersionError": 6}
