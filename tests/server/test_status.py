import asyncio
import json
import os
from pathlib import Path

import msgpack

from lmlive.config import ServerConfig
from lmlive.errors import ReleasePending
from lmlive.protocol.verbs import Verb
from lmlive.server.server import LivenessServer
from lmlive.testing.device import RecordingBackend
from tests.conftest import eventually
from tests.server.raw import BLOCK_BYTES, SECRET, Raw, Tie, bare, memory_file, register

SHAPE: dict[str, object] = {
    "server": {"pid": int, "epoch": str, "version": str, "state": str, "uptime_seconds": float},
    "liveness": {
        "reap_timeout_seconds": float,
        "registration_grace_seconds": float,
        "scan_interval_seconds": float,
        "last_scan_age_seconds": None,
        "watched_seconds": float,
        "tracked_instances": int,
        "reaps": {"exit": int, "silence": int, "never_pinged": int, "target": int},
        "removals": {"unregistered": int, "superseded": int},
    },
    "instances": [
        {
            "instance_id": str,
            "generation": int,
            "model": str,
            "rank": int,
            "pid": None,
            "state": str,
            "held": bool,
            "proven": bool,
            "evidence": str,
            "mode": str,
            "device": str,
            "silent_for_seconds": float,
            "registered_for_seconds": float,
            "mapped_bytes": int,
            "in_flight": int,
            "pings": int,
        }
    ],
    "releases": {"pending": int, "done": int, "by_exit": int, "stuck": int},
    "pool": {
        "bytes": int,
        "used_bytes": int,
        "chunks": int,
        "leased_chunks": int,
        "reserved_chunks": int,
        "held_back_chunks": int,
        "evictions": int,
        "refusals": int,
    },
    "lanes": {
        lane: {"threads": int, "busy": int, "queued": int}
        for lane in ("normal", "register", "transfer", "tier", "release")
    },
    "wire": {
        "frames": int,
        "bad_frames": int,
        "replies": int,
        "dropped_replies": int,
        "handshake_failures": int,
        "errors": {"UnknownVerb": int},
    },
}


def compare(value: object, shape: object, at: str = "status") -> None:
    """Check names and types, nothing more and nothing less."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), at
        assert list(value) == list(shape), at
        for name, inner in shape.items():
            compare(value[name], inner, f"{at}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), at
        for item in value:
            compare(item, shape[0], f"{at}[]")
    elif shape is None:
        assert value is None, at
    else:
        assert type(value) is shape, f"{at}: {value!r}"


async def test_status_has_exactly_the_public_names_everywhere(run_dir: Path) -> None:
    async with LivenessServer(ServerConfig(run_dir=run_dir, pool_bytes="2MiB")) as server, Raw(server.url) as raw:
        reply, _ = await raw.ask(Verb.REGISTER, bare(), instance_id=2**63 - 1)
        assert reply.generation == 1
        await raw.ask(99, [])
        over_the_wire = await raw.status()
        compare(over_the_wire, SHAPE)
        status = server.status()
        compare(status.to_dict(), SHAPE)
        assert status.instances[0].instance_id == str(2**63 - 1)
        assert over_the_wire["server"]["epoch"] == f"{server.epoch:016x}"
        assert over_the_wire["wire"]["errors"] == {"UnknownVerb": 1}
        snapshot = server._read_status()
        assert snapshot.to_dict() == snapshot.status().to_dict()
        assert over_the_wire["pool"]["bytes"] == 2 << 20
        assert json.loads(json.dumps(status.to_dict())) == msgpack.unpackb(msgpack.packb(status.to_dict()))
        await raw.result(Verb.UNREGISTER, [SECRET], instance_id=2**63 - 1)
        after = server.status()
        assert after.instances == ()
        assert after.liveness.removals.unregistered == 1
        assert after.releases.done == 1


async def test_memory_that_is_being_released_or_is_stuck_is_still_mapped(run_dir: Path) -> None:
    backend = RecordingBackend()
    gate = backend.gate("fence")
    config = ServerConfig(run_dir=run_dir, pool_bytes="2MiB")
    async with (
        LivenessServer(config, backend=backend) as server,
        Tie(server.url) as tie,
        Raw(server.url) as raw,
        Raw(server.url) as other,
    ):
        fd = memory_file("lmlive-status", 4 * BLOCK_BYTES)
        await tie.offer(fd)
        os.close(fd)
        await raw.result(Verb.REGISTER, register(), instance_id=7)
        asked = asyncio.create_task(raw.error(Verb.UNREGISTER, [SECRET], instance_id=7))
        for state in ("releasing", "stuck"):

            def found(state: str = state) -> bool:
                return [one.state for one in server.status().instances] == [state]

            await eventually(found)
            [listed] = (await other.status())["instances"]
            assert listed["mapped_bytes"] == 4 * BLOCK_BYTES
        assert isinstance(await asked, ReleasePending)
        gate.open()
        await eventually(lambda: server.status().instances == ())
