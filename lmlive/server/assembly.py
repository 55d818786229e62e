"""How the parts of a server are made and what they know of each other; nothing starts here.

The order in which they start and end is ``lmlive.server.server``'s.
"""

import asyncio
import importlib.util
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lmlive.cache.arena import Arena
from lmlive.cache.leases import LeaseTable
from lmlive.cache.store import ChunkStore
from lmlive.clock import Clock
from lmlive.config import ServerConfig
from lmlive.config.tiers import ValkeyPlace, tier_place
from lmlive.device.backend import DeviceBackend
from lmlive.device.host import HostBackend
from lmlive.liveness.policy import ReapPolicy
from lmlive.liveness.roster import Roster
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.liveness.watch import Watch
from lmlive.modules.books import Books, Cancel, Connections
from lmlive.modules.channels import connection_lost
from lmlive.modules.entries import Entries
from lmlive.server.curve import DoorKeys
from lmlive.server.discards import Discards
from lmlive.server.dispatcher import Dispatcher
from lmlive.server.lanes import Lanes
from lmlive.server.line import Line
from lmlive.server.ports import MakeDoor
from lmlive.server.reaper import Reaper, tick_interval
from lmlive.server.releases import Releases
from lmlive.server.router import Router
from lmlive.server.rundir import RunDir
from lmlive.server.tether import Tethers
from lmlive.server.tiers import THREADS, OpenTiers
from lmlive.tier.base import Tier


class Parts:
    """The parts of one server, made and connected.

    Args:
        config: The settings.
        epoch: Of this server's life.
        clock: Reads the time.
        targets: The embedder's own.
        backend: Opens device memory; the one that ``config.device`` names without.
        keys: For TCP; None: it is open.
        make_door: Makes the router in place of ``Router``; then there is neither run directory nor tether.
        status: Reads the whole status; gives what makes one map of it.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        epoch: int,
        clock: Clock,
        targets: Sequence[InstanceLivenessTarget],
        backend: DeviceBackend | None,
        keys: DoorKeys | None,
        make_door: MakeDoor | None,
        status: Callable[[], Callable[[], dict[str, object]]],
    ) -> None:
        loop = asyncio.get_running_loop()
        policy = ReapPolicy(
            timeout=config.worker_reap_timeout_seconds,
            grace=config.worker_registration_grace_seconds,
            hold=config.worker_alive_hold_seconds,
        )
        store = ChunkStore(Arena(config.pool_bytes))
        self.run_dir = RunDir(config.run_path, shared=bool(config.allow_uid)) if make_door is None else None
        self._listening: dict[str, socket.socket] = {}
        self.lanes = Lanes(
            loop,
            register_threads=config.register_threads,
            transfer_threads=config.transfer_threads,
            tier_threads=THREADS * max(len(config.tier), 1),
        )
        self.discards = Discards(self.lanes)
        self.books = Books(
            config=config,
            epoch=epoch,
            clock=clock,
            policy=policy,
            watch=Watch(tick_interval(policy.scan_interval)),
            roster=Roster(policy),
            entries=Entries(),
            backend=backend or HostBackend(),
            store=store,
            leases=LeaseTable(store, seconds=config.lease_seconds, token=partial(secrets.token_hex, 16)),
            targets=targets,
            connections=Connections(config.max_connections),
            later=partial(_later, loop),
            status=status,
            discard=self.discards.memory,
        )
        self.line = Line(clock)
        self.dispatcher = Dispatcher(self.books, self.lanes, self.line)
        self.door = (make_door or Router)(
            config.bind_urls,
            on_message=self.dispatcher.on_message,
            on_batch_end=self.dispatcher.end_batch,
            max_message_bytes=config.max_message_bytes,
            max_connections=config.max_connections,
            on_lost=partial(connection_lost, self.books),
            listening=self._listening,
            keys=keys,
            uids=frozenset({os.geteuid(), *config.allow_uid}) if config.allow_uid else frozenset(),
        )
        self.dispatcher.answer_over(self.door)
        self.line.follow(self.door)
        self.books.readmit = self.dispatcher.readmit
        self.tethers = Tethers(self.books, self.discards.foreign, self.discards.packet)
        self.releases = Releases(self.books, self.lanes)
        self.tiers: OpenTiers | None = None
        self.reaper = Reaper(self.books, self.line, self._tick)

    def take_tiers(self, tiers: Sequence[Tier]) -> OpenTiers:
        """Use these tiers, which are open, from now on."""
        self.tiers = OpenTiers(self.books, self.lanes, tiers)
        return self.tiers

    def _tick(self) -> None:
        self.tethers.sweep()
        if self.tiers is not None:
            self.tiers.tick()

    def open_run_dir(self) -> None:
        """Bind every unix socket: the door's, and a tether's beside each; blocks, so a thread does it at the start.

        Raises:
            StartError: The run directory or a path is in use, or cannot be trusted.
        """
        if self.run_dir is None:
            return
        self.run_dir.open()
        paths = {
            url: Path(url.removeprefix("ipc://")) for url in self.books.config.bind_urls if url.startswith("ipc://")
        }
        # A server without an ipc address has its tether in the run directory: HELLO tells where.
        beside = list(paths.values()) or [self.run_dir.path / "router.sock"]
        self.books.tether_path = f"{os.fspath(beside[0])}.tether"
        for url, path in paths.items():
            self._listening[url] = self.run_dir.stream(path)
        for path in beside:
            self.tethers.take(self.run_dir.tether(path))

    def close_run_dir(self) -> None:
        """Close what the door did not take, and give up every path; blocks."""
        for sock in self._listening.values():
            sock.close()
        if self.run_dir is not None:
            self.run_dir.close()


def check_extras(config: ServerConfig) -> None:
    """Refuse settings that need what is not installed.

    Raises:
        ConfigError: Names the command that installs it.
    """
    if config.http_address is not None and importlib.util.find_spec("aiohttp") is None:
        raise config.refusal("http", "off without aiohttp: install it with pip install 'lmlive[ops]'")
    places = map(tier_place, config.tier)
    if any(isinstance(place, ValkeyPlace) for place in places) and importlib.util.find_spec("valkey") is None:
        raise config.refusal("tier", "file:// without valkey: install it with pip install 'lmlive[valkey]'")


def _later(loop: asyncio.AbstractEventLoop, delay: float, callback: Callable[[], None]) -> Cancel:
    return loop.call_later(delay, callback).cancel
