"""Which verdict falls when a real server was stopped, or is under a flood."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lmlive.protocol.codec import encode_request
from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.server.raw import SECRET, Raw, bare
from tests.server.tethered import WORKER, line_of, offer, start

FLAGS = ("--pool-bytes", "2MiB", "--worker-reap-timeout-seconds", "1", "--worker-registration-grace-seconds", "60")
SHORT_ALLOWED = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
PATIENCE = 15.0

pytestmark = [pytest.mark.timeout(60), pytest.mark.may_block]  # reads what processes print


async def reaped(raw: Raw) -> dict[str, Any] | None:
    return next((event for event in await raw.events() if event["kind"] == "reaped"), None)


async def test_who_died_while_the_server_was_stopped_is_reaped_for_its_exit(run_dir: Path) -> None:
    async with ServerProcess(*FLAGS, run_dir=run_dir, environ=SHORT_ALLOWED) as server, Raw(server.url) as raw:
        address = f"{run_dir}/router.sock.tether"
        worker = await start(WORKER.format(address=address, packet=offer(secret=SECRET), before="", then=""))
        assert await line_of(worker) == "ready"
        await raw.result(Verb.REGISTER, bare(), instance_id=7)
        await raw.result(Verb.PING, [7], instance_id=7, epoch=server.epoch, generation=1)
        server.stop()
        worker.kill()
        await worker.communicate()
        await asyncio.sleep(1.5)  # longer than its budget, and nobody listens
        server.cont()
        event = await eventually(lambda: reaped(raw), within=PATIENCE)
        assert event is not None
        assert (event["reason"], event["exit_signal"]) == ("exit", 9)


FLOOD = """
import sys
sys.path[:0] = {path!r}
import zmq
sock = zmq.Context().socket(zmq.DEALER)
sock.sndhwm = 100_000
sock.connect({url!r})
while True:
    sock.send({request!r})
"""


async def test_a_flooding_peer_shelters_no_dead_and_harms_nobody_alive(run_dir: Path) -> None:
    async with (
        ServerProcess(*FLAGS, "--no-evidence", run_dir=run_dir, environ=SHORT_ALLOWED) as server,
        Raw(server.url) as raw,
    ):
        request = encode_request(Verb.PING, 1, [None])
        flood = await start(FLOOD.format(path=sys.path, url=server.url, request=request))
        try:
            live = {"instance_id": 8, "epoch": server.epoch, "generation": 1}
            await raw.result(Verb.REGISTER, bare(b"8" * 16), instance_id=8)
            await raw.result(Verb.REGISTER, bare(), instance_id=7)
            await raw.result(Verb.PING, [7], instance_id=7, epoch=server.epoch, generation=2)

            async def beat() -> dict[str, Any] | None:
                await raw.result(Verb.PING, [8], **live)
                return await reaped(raw)

            event = await eventually(beat, within=PATIENCE)
            assert event is not None
            assert (event["instance_id"], event["reason"]) == ("7", "silence")
            [instance] = (await raw.status())["instances"]
            assert (instance["instance_id"], instance["generation"]) == ("8", 1)
        finally:
            flood.kill()
            await flood.communicate()
