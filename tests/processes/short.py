"""A server process whose windows on silence are short, and what the kernel says that it holds."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.processes.kv_peer import CHUNK, Puppet
from tests.server.raw import Raw

TIMEOUT = 2.0
GRACE = 3.0
BEAT = {"heartbeat_interval": 0.2, "heartbeat_timeout": 0.5, "request_timeout": 2.0}
PATIENCE = 20.0


class Stage:
    """A server, and somebody who asks it.

    Attributes:
        server: The process.
        raw: A connection without an instance.
        evidence: Whether the server asks the kernel.
    """

    def __init__(self, server: ServerProcess, raw: Raw, *, evidence: bool) -> None:
        self.server = server
        self.raw = raw
        self.evidence = evidence

    def memories(self) -> list[str]:
        """Name the workers' memory files that it has mapped, as the kernel says."""
        return sorted(name for name in self.server.mappings() if "lmlive-kv" in name)

    async def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in await self.raw.events() if event["kind"] == kind]

    async def instances(self) -> dict[str, dict[str, Any]]:
        return {one["instance_id"]: one for one in (await self.raw.status())["instances"]}

    async def watched(self) -> float:
        return float((await self.raw.status())["liveness"]["watched_seconds"])

    async def watch(self, seconds: float) -> None:
        """Wait until the server has watched for so much longer."""
        begin = await self.watched()

        async def over() -> bool:
            return await self.watched() - begin > seconds

        await eventually(over, within=seconds + PATIENCE)

    async def reaped(self, who: Puppet) -> dict[str, Any]:
        """Wait until one was reaped, and all that it held given back; give the event."""
        mine = str(who.hello["instance_id"])

        async def is_gone() -> dict[str, Any] | None:
            gone = mine not in await self.instances()
            return next((one for one in await self.events("reaped") if gone and one["instance_id"] == mine), None)

        event: dict[str, Any] | None = await eventually(is_gone, within=PATIENCE)
        assert event is not None
        status = await self.raw.status()
        pool = status["pool"]
        assert (pool["leased_chunks"], pool["reserved_chunks"], pool["held_back_chunks"]) == (0, 0, 0)
        assert status["releases"]["pending"] == status["releases"]["stuck"] == 0
        return event

    async def chunks(self) -> int:
        return int((await self.raw.status())["pool"]["chunks"])

    async def reap(self, who: Puppet) -> None:
        """Reap a live one by hand."""
        await self.raw.result(Verb.REAP, [who.hello["instance_id"], None])


@contextlib.asynccontextmanager
async def stage(run_dir: Path, *flags: str, evidence: bool = True) -> AsyncIterator[Stage]:
    """Start a server."""
    windows = ("--worker-reap-timeout-seconds", str(TIMEOUT), "--worker-registration-grace-seconds", str(GRACE))
    flags = ("--pool-bytes", "4MiB", "--chunk-tokens", str(CHUNK), *windows, *flags)
    if not evidence:
        flags = (*flags, "--no-evidence")
    short = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
    async with ServerProcess(*flags, run_dir=run_dir, environ=short) as server, Raw(server.url) as raw:
        yield Stage(server, raw, evidence=evidence)
