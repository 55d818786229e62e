"""What the kernel tells a real server of real processes: in other pid namespaces, with numbers given twice, forked."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lmlive.protocol.codec import encode_request
from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.processes.namespaces import NAMESPACE, need_namespaces
from tests.server.raw import SECRET, Raw, bare
from tests.server.tethered import WORKER, line_of, offer, start

SMALL = ("--pool-bytes", "2MiB")
SHORT = ("--worker-reap-timeout-seconds", "1", "--worker-registration-grace-seconds", "1")
SHORT_ALLOWED = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
ROOT = Path(__file__).parents[2]
PATIENCE = 15.0

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]  # reads what processes print


@pytest.fixture
def _namespaces() -> None:
    need_namespaces()


needs_namespaces = pytest.mark.usefixtures("_namespaces")


@contextlib.asynccontextmanager
async def elsewhere(run_dir: Path, way: str = "SCM_PIDFD") -> AsyncIterator[Raw]:
    """Serve in a pid namespace of its own, with the better ways to a process switched off; give a connection to it."""
    off = {
        "SCM_PIDFD": "",
        "SO_PEERPIDFD": "e.SO_PASSPIDFD = 9999",
        "SO_PEERCRED": "e.SO_PASSPIDFD = e.SO_PEERPIDFD = 9999",
    }
    text = (
        f"import lmlive.server.evidence as e, runpy\n{off[way]}\nrunpy.run_module('lmlive.server', run_name='__main__')"
    )
    server = await asyncio.create_subprocess_exec(
        *NAMESPACE,
        sys.executable,
        "-c",
        text,
        "--run-dir",
        str(run_dir),
        *SMALL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        ready = await line_of(server)
        assert "pid=1 " in ready
        async with Raw(f"ipc://{run_dir}/router.sock") as raw:
            yield raw
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.communicate()


async def tethered(run_dir: Path, *command: str, then: str = "") -> asyncio.subprocess.Process:
    """Start a process with a tether."""
    address = f"{run_dir}/router.sock.tether"
    text = WORKER.format(address=address, packet=offer(secret=SECRET), before="", then=then)
    process = await start(text, *command, stdin=True)
    assert await line_of(process) == "ready"
    return process


async def register(raw: Raw) -> dict[str, Any]:
    await raw.result(Verb.REGISTER, bare(), instance_id=7)
    status = await raw.status()
    instance: dict[str, Any] = status["instances"][0]
    return instance


async def reaped(raw: Raw) -> dict[str, Any] | None:
    return next((event for event in await raw.events() if event["kind"] == "reaped"), None)


async def reaped_in_time(raw: Raw) -> dict[str, Any]:
    event: dict[str, Any] | None = await eventually(lambda: reaped(raw), within=PATIENCE)
    assert event is not None
    return event


async def suspected(raw: Raw) -> bool:
    [instance] = (await raw.status())["instances"]
    return bool(instance["state"] == "suspect")


@needs_namespaces
async def test_an_exit_in_a_sibling_pid_namespace_is_seen_though_the_pid_is_not(run_dir: Path) -> None:
    async with elsewhere(run_dir) as raw:
        process = await tethered(run_dir, *NAMESPACE)
        instance = await register(raw)
        assert (instance["evidence"], instance["pid"]) == ("process", None)
        process.kill()  # unshare, and with it the worker
        await process.communicate()
        event = await reaped_in_time(raw)
        assert (event["reason"], event["pid"], event["oom_killed"]) == ("exit", None, None)
        assert (await raw.status())["liveness"]["reaps"]["exit"] == 1


@needs_namespaces
@pytest.mark.parametrize("way", ["SO_PEERPIDFD", "SO_PEERCRED"])
async def test_a_pid_of_zero_is_neither_evidence_nor_a_refusal(run_dir: Path, way: str) -> None:
    async with elsewhere(run_dir, way) as raw:
        process = await tethered(run_dir, *NAMESPACE)
        instance = await register(raw)
        assert (instance["evidence"], instance["pid"], instance["state"]) == ("none", None, "active")
        process.kill()
        await process.communicate()
        await eventually(lambda: suspected(raw))
        assert await reaped(raw) is None
        assert (await raw.status())["liveness"]["tracked_instances"] == 1


@needs_namespaces
@pytest.mark.parametrize("way", ["SCM_PIDFD", "SO_PEERPIDFD", "SO_PEERCRED"])
@pytest.mark.parametrize("scene", ["dead", "unread"])
async def test_a_pid_that_is_given_again_confuses_nothing(way: str, scene: str) -> None:
    script = ROOT / "tests" / "processes" / "pid_reuse.py"
    process = await asyncio.create_subprocess_exec(
        *NAMESPACE,
        sys.executable,
        str(script),
        way,
        scene,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    out, err = await process.communicate()
    if b"cannot be chosen here" in err:
        pytest.skip(err.decode())
    assert out == b"done\n", err.decode()


@needs_namespaces
async def test_numbers_of_another_namespaces_proc_are_not_read() -> None:
    text = "import os; from lmlive.server.exits import start_time; print(os.getpid(), start_time(os.getpid()))"
    without_proc = [word for word in NAMESPACE if word != "--mount-proc"]
    for command, shown in ((without_proc, False), (NAMESPACE, True)):
        process = await asyncio.create_subprocess_exec(
            *command, sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        number, started = (await line_of(process)).split()
        await process.communicate()
        assert number == "1"
        assert (started != "None") is shown


FORKING = """
sys.path[:0] = {path!r}
import zmq
zocket = zmq.Context().socket(zmq.DEALER)
zocket.connect({url!r})
zocket.send({request!r})
zocket.recv()
child = os.fork()
if child == 0:
    time.sleep(60)
print(child, flush=True)
"""


@contextlib.asynccontextmanager
async def forked(server: ServerProcess, run_dir: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a worker with tether and connection, both of which a child of it holds open, and register it."""
    request = encode_request(Verb.REGISTER, 1, bare(), instance_id=7)
    then = FORKING.format(path=sys.path, url=server.url, request=request)
    address = f"{run_dir}/router.sock.tether"
    text = "import sys\n" + WORKER.format(address=address, packet=offer(secret=SECRET), before="", then=then)
    process = await start(text)
    child = int(await line_of(process))
    try:
        assert await line_of(process) == "ready"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        os.kill(child, signal.SIGKILL)
        await process.communicate()


async def test_a_child_that_holds_tether_and_connection_delays_no_exit(run_dir: Path) -> None:
    async with (
        ServerProcess(*SMALL, run_dir=run_dir) as server,
        Raw(server.url) as raw,
        forked(server, run_dir) as worker,
    ):
        worker.kill()
        event = await reaped_in_time(raw)
        assert (event["reason"], event["pid"], event["exit_signal"]) == ("exit", worker.pid, 9)
        assert [event["kind"] for event in await raw.events()] == ["registered", "reaped"]  # no channel was lost


async def test_without_evidence_a_childs_sockets_hide_the_exit_and_silence_alone_reaps(run_dir: Path) -> None:
    flags = (*SMALL, *SHORT, "--no-evidence")
    async with (
        ServerProcess(*flags, run_dir=run_dir, environ=SHORT_ALLOWED) as server,
        Raw(server.url) as raw,
        forked(server, run_dir) as worker,
    ):
        worker.kill()
        event = await reaped_in_time(raw)
        assert event["reason"] == "never_pinged"
        status = (await raw.status())["liveness"]
        assert (status["reaps"]["exit"], status["reaps"]["never_pinged"]) == (0, 1)


@pytest.mark.parametrize("pinged", [True, False])
async def test_without_evidence_a_live_process_is_not_held(run_dir: Path, pinged: bool) -> None:
    flags = (*SMALL, *SHORT, "--no-evidence")
    async with ServerProcess(*flags, run_dir=run_dir, environ=SHORT_ALLOWED) as server, Raw(server.url) as raw:
        process = await tethered(run_dir)
        instance = await register(raw)
        assert (instance["evidence"], instance["pid"]) == ("none", process.pid)
        if pinged:
            await raw.result(Verb.PING, [7], instance_id=7, epoch=server.epoch, generation=1)
        event = await reaped_in_time(raw)
        assert event["reason"] == ("silence" if pinged else "never_pinged")
        assert "held" not in [event["kind"] for event in await raw.events()]
        process.kill()
        await process.communicate()
        assert (await raw.status())["liveness"]["reaps"]["exit"] == 0


async def test_with_evidence_the_same_process_is_held_until_its_tether_closes(run_dir: Path) -> None:
    flags = (*SMALL, *SHORT)
    async with ServerProcess(*flags, run_dir=run_dir, environ=SHORT_ALLOWED) as server, Raw(server.url) as raw:
        process = await tethered(run_dir, then="print('ready', flush=True)\nos.read(0, 1)\nend.close()")
        await register(raw)

        async def held() -> bool:
            return bool((await raw.status())["instances"][0]["held"])

        await eventually(held, within=PATIENCE)
        assert await reaped(raw) is None
        await close_tether(process)
        event = await reaped_in_time(raw)
        assert event["reason"] == "never_pinged"
        process.kill()
        await process.communicate()


async def close_tether(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"x")
    await process.stdin.drain()
