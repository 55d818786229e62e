"""Who is at the other end of each tether: the process, what it sent, and what its end means.

Two facts come from here, and they are not the same: the socket's end is suspicion (a forked child may hold it open, a
live worker may close it), the process's exit is proof. Both concern the registrations of the peer's own secret, and no
other. Every descriptor that arrives is closed on every path, unless REGISTER takes it.

Loop thread only.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from functools import partial

from lmlive.errors import InvalidHandle, InvalidPayload, NotOwner, ServerBusy
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.roster import Registration
from lmlive.modules.books import Books
from lmlive.modules.channels import suspect
from lmlive.modules.management import hash_secret
from lmlive.modules.removal import remove
from lmlive.modules.tethers import Discard, FdTable, TetherRecord, Waiting, is_shared_memory
from lmlive.protocol.tether import Offer, PoolRequest
from lmlive.protocol.verbs import Role
from lmlive.server.cgroups import Cgroups
from lmlive.server.evidence import Sender
from lmlive.server.exits import WatchedProcess
from lmlive.server.turn import Turn

log = logging.getLogger("lmlive.server")

UNUSED_SECONDS = 10.0
"""How long descriptors wait for the REGISTER that names them, and a socket for its first offer."""

PARTING_SECONDS = 1.0
"""How long a process that closed its tether, and left nothing here, is still watched: a dying one closes its
descriptors a moment before its exit is told, and what it had sent by then must mean nothing afterwards."""


class Peer:
    """One connection, and the process at its other end once it said who it is.

    Args:
        sock: The connection.
        since: When it was made.
        started: When the process that connected was started, where that is needed.
    """

    __slots__ = ("process", "record", "since", "sock", "started")

    def __init__(self, sock: socket.socket, since: float, started: int | None) -> None:
        self.sock: socket.socket | None = sock
        self.since = since
        self.started = started
        self.record: TetherRecord | None = None
        self.process: WatchedProcess | None = None


class Peers:
    """All tethers that stand, and all processes that are watched.

    Args:
        books: The server's state.
        discard: Closes sockets in which descriptors may wait unread, and descriptors of whatever kind.
        turn: The share of a pass that ends of processes may take.
    """

    def __init__(self, books: Books, discard: Discard, turn: Turn) -> None:
        self.connections = 0
        """How many tethers stand."""
        self._books = books
        self._discard = discard
        self._turn = turn
        self._loop = asyncio.get_running_loop()
        self._all: set[Peer] = set()
        self._by_secret: dict[bytes, Peer] = {}
        self._waiting = Waiting(books.discard)
        self._allowed = {os.geteuid(), *books.config.allow_uid}
        self._most_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._cgroups = Cgroups()

    def __len__(self) -> int:
        """Count them, with those whose socket is closed."""
        return len(self._all)

    def add(self, sock: socket.socket, started: int | None) -> Peer:
        """Take in a connection that was greeted."""
        peer = Peer(sock, self._books.clock.now(), started)
        self._all.add(peer)
        self.connections += 1
        return peer

    def take_offer(self, peer: Peer, offer: Offer, sender: Sender) -> int:
        """Check an offer and put its descriptors into the table; whatever is refused, the caller closes.

        Returns:
            How many descriptors the table holds now.

        Raises:
            LMLiveError: It is refused. After ``ServerBusy`` everything is as it was before.
        """
        self._check(offer, sender)
        if self._waiting.count + offer.count > self._most_fds:
            raise ServerBusy("too many descriptors wait here: come again", retry_after=1.0, limit=self._most_fds)
        record = peer.record or self._begin(peer, offer, sender)
        if record.secret_hash != hash_secret(offer.secret) or record.instance_id != offer.instance_id:
            raise NotOwner("a tether speaks for one worker: open another one")
        if record.pid is not None and sender.pid is not None and record.pid != sender.pid:
            raise NotOwner("this tether belongs to another process: open one of your own", pid=record.pid)
        table = record.table
        if offer.first == 0:
            table.close()
            table.slots.clear()
        if offer.first != len(table.slots):
            raise InvalidPayload("descriptors came out of order", expected=len(table.slots), got=offer.first)
        table.uid = -1 if sender.uid is None else sender.uid
        table.received_at = self._books.clock.now()
        for fd in sender.take_fds():
            table.add(fd)
        if self._registered(record) is not None:
            self._books.roster.tethered(record.instance_id, record.evidence, record.pid)
        return len(table.slots)

    def give_pool(self, peer: Peer, request: PoolRequest, sender: Sender) -> list[int]:
        """Give descriptors of the pool to a worker that is to copy by itself; the caller closes them.

        It has what it writes there held back until it says that it is done, or its process ends: so that must be told.

        Raises:
            InvalidHandle: It cannot have them; the tether stands on.
            NotOwner: It is not the process of this tether.
            ServerStarting: There is no pool yet.
        """
        record = peer.record
        if record is None or (record.secret_hash, record.instance_id) != (
            hash_secret(request.secret),
            request.instance_id,
        ):
            raise NotOwner("a tether speaks for one worker: make an offer first")
        if sender.uid != os.geteuid() or record.pid is None or record.pid != sender.pid:
            raise InvalidHandle("the pool goes to the server's own user alone, and to the process that made the offer")
        if record.evidence is not Evidence.PROCESS:
            raise InvalidHandle("the pool goes to processes whose exit the kernel tells, and of this one it does not")
        fds = self._books.share_pool()
        record.has_pool = True
        return fds

    def lose(self, peer: Peer) -> None:
        """Note that the socket ended: suspicion. The process is watched on."""
        self._close_socket(peer)
        record = peer.record
        if record is None:
            self._all.discard(peer)
            return
        record.open = False
        record.closed_at = self._books.clock.now()
        record.table.close()
        registration = self._registered(record)
        if registration is not None:
            suspect(self._books, registration)

    def close(self) -> None:
        """Close everything; twice is once."""
        for peer in tuple(self._all):
            self._forget(peer)

    def sweep(self) -> None:
        """End what waited too long: silent sockets, descriptors that nobody asked for, processes that left nothing."""
        now = self._books.clock.now()
        for peer in tuple(self._all):
            record = peer.record
            if record is None:
                if now - peer.since > UNUSED_SECONDS:
                    log.info("tether silent seconds=%g", UNUSED_SECONDS)
                    self.lose(peer)
                continue
            if record.table.held and now - record.table.received_at > UNUSED_SECONDS:
                log.info("descriptors unused instance_id=%d count=%d", record.instance_id, record.table.held)
                record.table.close()
            if peer.sock is None and now - record.closed_at > PARTING_SECONDS and not self._left_something(record):
                self._forget(peer)

    def _left_something(self, record: TetherRecord) -> bool:
        """Tell whether the end of a record's process would still change anything."""
        books = self._books
        opening = books.openings.get(record.instance_id)
        return (
            self._registered(record) is not None
            or (opening is not None and opening.secret_hash == record.secret_hash)
            or books.leases.holds(record.secret_hash)
            or books.prepared.holds(record.secret_hash)
        )

    def _registered(self, record: TetherRecord) -> Registration | None:
        """Give the live registration of a record's secret."""
        registration = self._books.roster.get(record.instance_id)
        if registration is None or registration.secret_hash != record.secret_hash:
            return None
        return registration

    # Offers

    def check_user(self, uid: int | None) -> None:
        """Refuse strangers.

        Raises:
            NotOwner: Names their uid, and those that are none.
        """
        if uid not in self._allowed:
            allowed = ", ".join(map(str, sorted(self._allowed)))
            raise NotOwner(
                f"uid {uid} may not use this server, only {allowed}: run both as one user, or start it with "
                f"--allow-uid {uid}",
                uid=uid,
                allowed=sorted(self._allowed),
            )

    def _check(self, offer: Offer, sender: Sender) -> None:
        """Refuse strangers, and what an offer may not bring."""
        self.check_user(sender.uid)
        if offer.count != len(sender.fds):
            raise InvalidPayload("an offer came with another number of descriptors than it says", expected=offer.count)
        for index, fd in enumerate(sender.fds):
            if not is_shared_memory(fd):
                raise InvalidHandle(
                    "a descriptor is of no shared memory: send memory files, or files of /dev/shm",
                    index=offer.first + index,
                )

    def _begin(self, peer: Peer, offer: Offer, sender: Sender) -> TetherRecord:
        """Take the first offer of a connection: from here on it stands for a process."""
        secret_hash = hash_secret(offer.secret)
        process = self._succeed(secret_hash, sender)
        if process is None and sender.pidfd >= 0 and self._books.config.evidence:
            process = WatchedProcess(sender.take_pidfd(), sender.pid, sender.uid, self._cgroups.find_counter)
        record = TetherRecord(
            secret_hash=secret_hash,
            instance_id=offer.instance_id,
            role=int(offer.role),
            evidence=Evidence.NONE if process is None else Evidence.PROCESS,
            pid=sender.pid,
            table=FdTable(self._waiting),
        )
        peer.record = record
        self._by_secret[secret_hash] = peer
        self._books.tethers[secret_hash] = record
        if process is not None:
            peer.process = process
            self._loop.add_reader(process.pidfd, self._on_exit_told, peer)
        return record

    def _succeed(self, secret_hash: bytes, sender: Sender) -> WatchedProcess | None:
        """End the tether that stood for this secret; give its process, if that is the sender and nothing names it now.

        A pid of a process that still runs is nobody else's. While one lives, no other takes over its secret, whether
        its socket stands or not: the other's end would be taken for its own.
        """
        other = self._by_secret.get(secret_hash)
        if other is None or other.record is None:
            return None
        process = other.process
        if process is not None and process.exited:
            self._on_exit(other)  # told, and not yet read: it must not be forgotten
            return None
        pid = other.record.pid
        lives = process is not None or other.sock is not None
        if lives and pid is not None and sender.pid is not None and pid != sender.pid:
            raise NotOwner("another process holds this worker's tether", pid=pid)
        if process is not None and sender.pidfd < 0 and pid is not None and pid == sender.pid:
            self._loop.remove_reader(process.pidfd)
            other.process = None
        else:
            process = None
        self._forget(other)
        return process

    # Ends

    def _on_exit_told(self, peer: Peer) -> None:
        if self._turn.now() or peer.process is None:
            self._on_exit(peer)
        else:
            self._loop.remove_reader(peer.process.pidfd)
            self._turn.queue(partial(self._on_exit_later, peer), urgent=True)

    def _on_exit_later(self, peer: Peer) -> None:
        if peer.process is not None:  # it was not forgotten meanwhile
            self._on_exit(peer)

    def _on_exit(self, peer: Peer) -> None:
        """The process ended: proof. What is pending from it means nothing any more."""
        record, process = peer.record, peer.process
        ended = None if process is None else process.read_exit()
        self._forget(peer)
        if record is None:
            return
        books = self._books
        if record.role == Role.WORKER:  # nobody else's secret can register anything
            books.roster.end_secret(record.secret_hash)
        registration = self._registered(record)
        if registration is not None:
            removal = books.roster.exited(registration.instance_id, registration.generation, books.moment())
            if removal is not None:
                remove(books, removal, ended)
        books.end_owner(record.secret_hash)

    def _forget(self, peer: Peer) -> None:
        """Close all that is held for a connection and its process."""
        self._all.discard(peer)
        self._close_socket(peer)
        process, peer.process = peer.process, None
        if process is not None:
            self._loop.remove_reader(process.pidfd)
            process.close()
        record, peer.record = peer.record, None
        if record is not None:
            record.open = False
            record.table.close()
            del self._books.tethers[record.secret_hash]
            del self._by_secret[record.secret_hash]

    def _close_socket(self, peer: Peer) -> None:
        sock, peer.sock = peer.sock, None
        if sock is not None:
            self.connections -= 1
            self._loop.remove_reader(sock.fileno())
            with contextlib.suppress(OSError):  # the other end is gone already
                sock.shutdown(socket.SHUT_RDWR)
            self._discard([sock.detach()])
