"""A server process whose windows on silence are short, and what the kernel says that it holds."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess
from tests.conftest import eventually
from tests.processes.kv_peer import CHUNK, ROOT, Puppet
from tests.processes.namespaces import only_child
from tests.server.raw import Raw

TIMEOUT = 2.0
GRACE = 3.0
BEAT: dict[str, Any] = {"heartbeat_interval": 0.2, "heartbeat_timeout": 0.5, "request_timeout": 2.0}
PATIENCE = 20.0


class Held(NamedTuple):
    """What the kernel says that a server holds.

    Args:
        segments: The workers' memory that it maps, each by device and inode.
        descriptors: Number and target of each.
    """

    segments: frozenset[str]
    descriptors: frozenset[tuple[int, str]]


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

    def held(self) -> Held:
        """Ask the kernel what it holds."""
        lines = Path(f"/proc/{self.server.pid}/maps").read_text().splitlines()
        segments = {" ".join(line.split()[3:5]) for line in lines if "lmlive-kv" in line}
        return Held(frozenset(segments), frozenset(self.server.descriptors().items()))

    async def holds_only(self, before: Held) -> None:
        """See that it maps just the same again, and wait until it has no descriptor that it had not."""
        assert self.held().segments == before.segments
        # libzmq closes connections in its own time
        await eventually(lambda: not self.held().descriptors - before.descriptors, within=PATIENCE)

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
        await eventually(self.owes_nothing, within=PATIENCE)  # a lease may have an end of its own
        return event

    async def owes_nothing(self) -> bool:
        """Tell whether no chunk is leased or reserved any more, and no memory waits for its release."""
        status = await self.raw.status()
        pool, releases = status["pool"], status["releases"]
        assert releases["stuck"] == 0
        return not any((pool["leased_chunks"], pool["reserved_chunks"], pool["held_back_chunks"], releases["pending"]))

    async def undisturbed(self, who: Puppet) -> None:
        """See that one is what it was when it came, and that its next request is served."""
        assert (await who.ask("retrieve"))["reason"] == "loaded"
        instance = (await self.instances())[str(who.hello["instance_id"])]
        assert (instance["state"], instance["generation"]) == ("active", who.hello["generation"])


class Prefixed(ServerProcess):
    """A server whose interpreter is started by another command, or that another module runs.

    Args:
        arguments: As for any other.
        run_dir: The server's.
        environ: Variables on top of our own.
        under: The command, as ``unshare``.
        build: The module, and its arguments.
    """

    def __init__(
        self,
        *arguments: str,
        run_dir: Path,
        environ: dict[str, str],
        under: Sequence[str] = (),
        build: Sequence[str] = (),
    ) -> None:
        super().__init__(*arguments, run_dir=run_dir, environ={**environ, "PYTHONPATH": ROOT})
        python, as_module, *rest = self.arguments
        self.arguments = (*under, python, as_module, *build, *rest)
        self._under = under

    @property
    def pid(self) -> int:
        """The server's own process, which a command in front of it may have for its child."""
        started = super().pid
        return only_child(started) if self._under else started


@contextlib.asynccontextmanager
async def stage(
    run_dir: Path, *flags: str, evidence: bool = True, under: Sequence[str] = (), build: Sequence[str] = ()
) -> AsyncIterator[Stage]:
    """Start a server, by another command or of another build if need be."""
    windows = ("--worker-reap-timeout-seconds", str(TIMEOUT), "--worker-registration-grace-seconds", str(GRACE))
    flags = ("--pool-bytes", "4MiB", "--chunk-tokens", str(CHUNK), *windows, *flags)
    if not evidence:
        flags = (*flags, "--no-evidence")
    short = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
    starting = Prefixed(*flags, run_dir=run_dir, environ=short, under=under, build=build)
    async with starting as server, Raw(server.url) as raw:
        await raw.ask(Verb.STATUS, [])  # from here on our own connection is among its descriptors
        yield Stage(server, raw, evidence=evidence)


async def both_ways(
    run_dir: Path, play: Callable[[Stage], Awaitable[None]], *flags: str, blind: Sequence[str] = ()
) -> None:
    """Play a scene twice at the same time: with the kernel's word, and by the windows on silence alone.

    Args:
        run_dir: Where both servers' are.
        play: The scene.
        flags: Of both servers.
        blind: More of the one that is not told of exits.
    """

    async def play_once(evidence: bool) -> None:
        way = "evidence" if evidence else "silence"
        more = () if evidence else blind
        try:
            async with stage(run_dir / way, *flags, *more, evidence=evidence) as at:
                await play(at)
        except BaseException as error:
            error.add_note(f"the way: {way}")
            raise

    await to_their_ends(play_once(True), play_once(False))


async def to_their_ends(*plays: Awaitable[None]) -> None:
    """Play scenes at the same time; each comes to its end whatever the others do, so that nothing is left behind."""
    for outcome in await asyncio.gather(*plays, return_exceptions=True):
        if outcome is not None:
            raise outcome
