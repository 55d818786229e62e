import asyncio
import contextlib
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lmlive.protocol.verbs import Verb
from lmlive.testing.processes import ServerProcess
from tests.conftest import eventually
from tests.server.raw import BLOCK_BYTES, Raw, Tie, bare, memory_file, names_in, register

SMALL = ("--pool-bytes", "2MiB")


def holds(server: ServerProcess, name: str) -> bool:
    """Tell whether the server maps a file of this name."""
    return name in Path(f"/proc/{server.pid}/maps").read_text()


async def test_the_ready_line_and_a_clean_end(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        assert list(server.ready) == ["bind", "http", "pid", "epoch", "version"]
        assert server.ready["bind"] == f"ipc://{run_dir}/router.sock"
        assert server.ready["pid"] == str(server.pid)
        async with Raw(server.url) as raw:
            assert (await raw.ask(Verb.PING, [None]))[0].epoch == server.epoch
            assert (await raw.status())["server"]["pid"] == server.pid
        server.terminate()
        assert await server.wait() == 0
    assert "router.sock" not in names_in(run_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_every_entry_is_released(run_dir: Path, number: signal.Signals) -> None:
    async with ServerProcess(*SMALL, "--log-format", "json", run_dir=run_dir) as server:
        async with Raw(server.url) as raw, Tie((await raw.hello())[5]) as tie:
            fd = memory_file("lmlive-test", 4 * BLOCK_BYTES)
            await tie.offer(fd)
            os.close(fd)
            await raw.result(Verb.REGISTER, register(), instance_id=7)
            os.kill(server.pid, number)
            assert await server.wait() == 0
        assert '"event": "released"' in server.log


async def test_a_second_server_on_the_run_dir_exits_1_and_names_the_first(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        second = ServerProcess(*SMALL, run_dir=run_dir)
        with pytest.raises(RuntimeError, match=f"status 1.*process {server.pid}|(?s:status 1.*{server.pid})"):
            await second.__aenter__()
        async with Raw(server.url) as raw:
            assert await raw.silent()


async def run(*flags: str, stdout: int = asyncio.subprocess.PIPE) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lmlive.server", *flags, stdout=stdout, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode or 0, (out or b"").decode(), err.decode()


async def test_bad_flags_exit_2(run_dir: Path) -> None:
    status, out, err = await run("--run-dir", str(run_dir), "--pool-bytes", "-1")
    assert (status, out) == (2, "")
    assert "--pool-bytes" in err
    assert names_in(run_dir) == set()


async def test_a_failed_start_exits_1(run_dir: Path) -> None:
    status, out, err = await run("--run-dir", str(run_dir), "--pool-bytes", "1000TiB")
    assert (status, out) == (1, "")
    assert "start failed" in err


async def test_help_and_version_exit_0() -> None:
    assert (await run("--version"))[0] == 0
    assert "--worker-reap-timeout-seconds" in (await run("--help"))[1]


async def test_a_killed_servers_successor_takes_the_run_dir(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        first = server.epoch
        server.kill()
        assert await server.wait() == -signal.SIGKILL
    async with ServerProcess(*SMALL, run_dir=run_dir) as server:
        assert server.epoch != first
        async with Raw(server.url) as raw:
            assert await raw.silent()


async def serves(raw: Raw) -> bool:
    return bool((await raw.status())["server"]["state"] == "serving")


async def test_a_stdout_that_nobody_reads_is_no_reason_to_stop(run_dir: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lmlive.server", "--run-dir", str(run_dir), *SMALL, stdout=write
    )
    os.close(write)
    async with Raw(f"ipc://{run_dir}/router.sock") as raw:
        await eventually((run_dir / "router.sock").exists, within=15)
        await eventually(lambda: serves(raw))
    process.terminate()
    assert await process.wait() == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
async def test_without_standard_descriptors_it_serves_and_ends_cleanly(run_dir: Path, closed: str) -> None:
    command = f'exec "$0" -m lmlive.server --run-dir "$1" --pool-bytes 2MiB {closed}'
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", command, sys.executable, str(run_dir), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await eventually((run_dir / "router.sock").exists, within=15)
        async with Raw(f"ipc://{run_dir}/router.sock") as raw:
            await eventually(lambda: serves(raw))
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def few_descriptors(count: int) -> tuple[str, ...]:
    """Give the command that starts a server which may have so many."""
    return ("/bin/sh", "-c", f'ulimit -n {count}; exec "$0" "$@"', sys.executable, "-m", "lmlive.server")


async def test_with_few_descriptors_a_crowd_at_the_door_does_not_kill_it(run_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *few_descriptors(64),
        "--run-dir",
        str(run_dir),
        *SMALL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert (await asyncio.wait_for(process.stdout.readline(), 15)).startswith(b"lmlive ready")
    url = f"ipc://{run_dir}/router.sock"
    async with AsyncExitStack() as peers:
        early = await peers.enter_async_context(Raw(url))
        assert await early.silent()
        for _ in range(64):  # ordinary ones, strangers that say nothing, and tethers
            peer = await peers.enter_async_context(Raw(url))
            await peer.send(b"hello")
            stranger = socket.socket(socket.AF_UNIX)
            peers.callback(stranger.close)
            tether = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peers.callback(tether.close)
            for sock, path in ((stranger, ""), (tether, ".tether")):
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(url.removeprefix("ipc://") + path)
            assert await early.silent()
        assert process.returncode is None
    async with Raw(url) as late:
        assert await late.silent()
    process.terminate()
    _, err = await process.communicate()
    assert process.returncode == 0
    assert b"connections limited" in err


async def test_with_too_few_descriptors_to_serve_it_exits_1_and_says_how_many(run_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *few_descriptors(40), "--run-dir", str(run_dir), *SMALL, stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"raise it to" in err


WORKER = """
import array, socket, sys, time
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
tie.sendmsg([Offer(SECRET, 7, 1, 0, 1).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
tie.recv(1000)
sock.send(encode_request(3, 1, register(), instance_id=7))
print(decode_header(sock.recv()).code, flush=True)
time.sleep(60)
"""


async def test_a_killed_worker_that_never_pinged_leaves_nothing(run_dir: Path) -> None:
    async with ServerProcess(*SMALL, run_dir=run_dir) as server, Raw(server.url) as raw:
        text = WORKER.format(path=sys.path, url=server.url)
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE)
        assert worker.stdout is not None
        assert await asyncio.wait_for(worker.stdout.readline(), 10) == b"0\n"
        assert holds(server, "lmlive-victim")
        await raw.result(Verb.REGISTER, bare(b"b" * 16), instance_id=8)
        worker.kill()
        await worker.communicate()
        await eventually(lambda: released(raw))
        assert not holds(server, "lmlive-victim")
        status = await raw.status()
        assert [instance["instance_id"] for instance in status["instances"]] == ["8"]
        assert status["liveness"]["reaps"]["exit"] == 1
        assert status["releases"]["done"] == 1
        [reaped] = [event for event in await raw.events() if event["kind"] == "reaped"]
        assert (reaped["reason"], reaped["pid"]) == ("exit", worker.pid)
        assert f"reaped instance_id=7 generation=1 reason=exit model=m rank=0 pid={worker.pid}" in server.log


async def test_a_stopped_server_reaps_no_live_worker(run_dir: Path) -> None:
    flags = ("--worker-reap-timeout-seconds", "1", "--worker-registration-grace-seconds", "60")
    environ = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
    async with (
        ServerProcess(*SMALL, *flags, "--no-evidence", run_dir=run_dir, environ=environ) as server,
        Raw(server.url) as raw,
    ):
        await raw.result(Verb.REGISTER, bare(), instance_id=7)
        mine = {"instance_id": 7, "epoch": server.epoch, "generation": 1}
        await raw.result(Verb.PING, [7], **mine)
        server.stop()
        await asyncio.sleep(3)  # three times the timeout, in which nobody listens
        server.cont()
        reply, _ = await raw.ask(Verb.PING, [7], **mine)
        assert reply.generation == 1
        assert (await raw.status())["liveness"]["reaps"]["silence"] == 0
        await eventually(lambda: gone(raw))


async def released(raw: Raw) -> bool:
    status = await raw.status()
    return bool(status["releases"]["done"])


async def gone(raw: Raw) -> bool:
    status = await raw.status()
    return bool(status["liveness"]["reaps"]["silence"])
