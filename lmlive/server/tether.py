"""The tether: a unix socket per worker process, over which descriptors come in and the process's end is seen.

The server greets first. A worker then says who it is and sends descriptors, batch by batch; each batch gets its
receipt. Two facts come from here, and they are not the same: the socket's end is suspicion (a forked child may hold it
open, a live worker may close it), the process's exit is proof. Every descriptor that arrives is closed on every path,
unless REGISTER takes it.

Loop thread only.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from functools import partial

from lmlive.errors import InternalError, InvalidHandle, InvalidPayload, LMLiveError, NotOwner, ServerBusy
from lmlive.liveness.evidence import Evidence
from lmlive.liveness.roster import Registration
from lmlive.modules.books import Books
from lmlive.modules.events import note
from lmlive.modules.management import hash_secret
from lmlive.modules.removal import remove
from lmlive.modules.tethers import Discard, FdTable, TetherRecord, Waiting, is_shared_memory
from lmlive.protocol.tether import MAX_FDS, MAX_PACKET_BYTES, Greeting, Offer, Receipt, encode_refusal
from lmlive.protocol.verbs import Role
from lmlive.server.evidence import ANCILLARY_BYTES, Sender, ask_for_sender, read_exit, read_sender
from lmlive.server.turnstile import need_descriptors

log = logging.getLogger("lmlive.server")

UNUSED_SECONDS = 10.0
"""How long descriptors wait for the REGISTER that names them, and a socket for its first offer."""

PARTING_SECONDS = 1.0
"""How long a process that closed its tether, and left nothing here, is still watched: a dying one closes its
descriptors a moment before its exit is told, and what it had sent by then must mean nothing afterwards."""

SUSPICION_SECONDS = 0.05
"""How long after the end of its socket a process that has not exited is reported as suspect."""

_ACCEPTS_AT_ONCE = 64
_ACCEPT_AGAIN = 0.1
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Peer:
    """One connection, and the process at its other end once it said who it is."""

    __slots__ = ("pidfd", "record", "since", "sock")

    def __init__(self, sock: socket.socket, since: float) -> None:
        self.sock: socket.socket | None = sock
        self.since = since
        self.record: TetherRecord | None = None
        self.pidfd = -1


class Tethers:
    """Listens, and keeps the books told.

    Lifecycle: ``take`` gives it its sockets, ``open`` begins to listen, ``close`` closes every socket and descriptor
    that is still here.

    Args:
        books: The server's state.
        discard: Closes sockets in which descriptors may wait unread, and descriptors of whatever kind.
    """

    def __init__(self, books: Books, discard: Discard) -> None:
        self.connections = 0
        """How many tethers stand."""
        self.refused = 0
        self._books = books
        self._discard = discard
        self._listeners: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()
        self._peers: set[Peer] = set()
        self._by_secret: dict[bytes, Peer] = {}
        self._waiting = Waiting(books.discard)
        self._allowed = {os.geteuid(), *books.config.allow_uid}
        self._most_peers = books.config.max_connections
        self._most_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def take(self, listener: socket.socket) -> None:
        """Own a listening SEQPACKET socket from now on."""
        self._listeners.append(listener)

    def open(self) -> None:
        """Begin to listen."""
        for listener in self._listeners:
            self._listen(listener)

    def close(self) -> None:
        """Close everything; twice is once."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for peer in tuple(self._peers):
            self._forget(peer)

    def sweep(self) -> None:
        """End what waited too long: silent sockets, descriptors that nobody asked for, processes that left nothing."""
        now = self._books.clock.now()
        for peer in tuple(self._peers):
            record = peer.record
            if record is None:
                if now - peer.since > UNUSED_SECONDS:
                    log.info("tether silent seconds=%g", UNUSED_SECONDS)
                    self._lose(peer)
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
        )

    # Connections

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._on_connection, listener)

    def _on_connection(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                need_descriptors()
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    # The listener stays readable: without a pause the loop would spin on it.
                    log.error("tether accept failed error=%s", error)
                    self._loop.remove_reader(listener.fileno())
                    self._loop.call_later(_ACCEPT_AGAIN, self._listen, listener)
                    return
                continue
            self._greet(sock)

    def _greet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if self.connections >= self._most_peers:
            self._refuse(sock, ServerBusy("too many tethers: come again", retry_after=1.0, limit=self._most_peers))
            sock.close()
            return
        try:
            ask_for_sender(sock)  # before the greeting: whoever answers it is named
            sock.send(Greeting(self._books.epoch).encode())
        except OSError:
            sock.close()
            return
        peer = Peer(sock, self._books.clock.now())
        self._peers.add(peer)
        self.connections += 1
        self._loop.add_reader(sock.fileno(), self._on_packet, peer, sock)

    def _refuse(self, sock: socket.socket, error: LMLiveError) -> None:
        self.refused += 1
        self._books.errors[type(error).__name__] += 1
        with contextlib.suppress(OSError):  # it is gone, or does not read: it is cut off either way
            sock.send(encode_refusal(error))

    def _on_packet(self, peer: Peer, sock: socket.socket) -> None:
        try:
            need_descriptors(MAX_FDS)
            packet, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, ANCILLARY_BYTES, _FLAGS)
        except BlockingIOError:
            return
        except OSError:
            self._lose(peer)
            return
        if not packet and not ancillary:
            self._lose(peer)
            return
        sender = Sender()
        try:
            read_sender(sock, ancillary, sender)
            _check_whole(flags)
            received = self._take_offer(peer, Offer.decode(packet), sender)
            sock.send(Receipt(received).encode())
        except LMLiveError as error:
            self._refuse(sock, error)
            self._lose(peer)
        except OSError:  # it does not read its receipts
            self._lose(peer)
        except Exception:
            log.exception("tether failed")
            self._refuse(sock, InternalError("the server failed on this offer, see its log"))
            self._lose(peer)
        finally:
            self._discard(sender.take_fds())
            sender.close()

    # Offers

    def _take_offer(self, peer: Peer, offer: Offer, sender: Sender) -> int:
        """Check an offer and put its descriptors into the table; whatever is refused, the caller closes."""
        self._check_offer(offer, sender)
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
        if self._waiting.count + offer.count > self._most_fds:
            raise ServerBusy("too many descriptors wait here: come again", retry_after=1.0, limit=self._most_fds)
        table.uid = -1 if sender.uid is None else sender.uid
        table.received_at = self._books.clock.now()
        for fd in sender.take_fds():
            table.add(fd)
        if self._registered(record) is not None:
            self._books.roster.tethered(record.instance_id, record.evidence, record.pid)
        return len(table.slots)

    def _check_offer(self, offer: Offer, sender: Sender) -> None:
        """Refuse strangers, and what an offer may not bring."""
        uid = sender.uid
        if uid not in self._allowed:
            allowed = ", ".join(map(str, sorted(self._allowed)))
            raise NotOwner(
                f"uid {uid} may not use this server, only {allowed}: run both as one user",
                uid=uid,
                allowed=sorted(self._allowed),
            )
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
        other = self._by_secret.get(secret_hash)
        if other is not None and other.record is not None:
            pids = {other.record.pid, sender.pid} - {None}
            if other.sock is not None and len(pids) == 2:
                raise NotOwner("another process holds this worker's tether", pid=other.record.pid)
            self._forget(other)
        proven = sender.pidfd >= 0 and self._books.config.evidence
        record = TetherRecord(
            secret_hash=secret_hash,
            instance_id=offer.instance_id,
            role=int(offer.role),
            evidence=Evidence.PROCESS if proven else Evidence.NONE,
            pid=sender.pid,
            table=FdTable(self._waiting),
        )
        peer.record = record
        self._by_secret[secret_hash] = peer
        self._books.tethers[secret_hash] = record
        if proven:
            peer.pidfd = sender.take_pidfd()
            self._loop.add_reader(peer.pidfd, self._on_exit, peer)
        return record

    def _registered(self, record: TetherRecord) -> Registration | None:
        """Give the live registration of a record's secret."""
        registration = self._books.roster.get(record.instance_id)
        if registration is None or registration.secret_hash != record.secret_hash:
            return None
        return registration

    # Ends

    def _lose(self, peer: Peer) -> None:
        """The socket ended: suspicion. The process is watched on."""
        self._close_socket(peer)
        record = peer.record
        if record is None:
            self._peers.discard(peer)
            return
        record.open = False
        record.closed_at = self._books.clock.now()
        record.table.close()
        registration = self._registered(record)
        if registration is not None:
            self._books.roster.channel_lost(registration.instance_id, registration.generation)
            self._books.later(SUSPICION_SECONDS, partial(self._tell_lost, record, registration))

    def _tell_lost(self, record: TetherRecord, registration: Registration) -> None:
        """Say that a channel was lost, if it is more than the first sign of the process's exit."""
        if record.open or self._registered(record) is not registration or not registration.suspect:
            return
        facts: dict[str, object] = {
            "instance_id": str(registration.instance_id),
            "generation": registration.generation,
            "reason": "channel_lost",
            "model": registration.model,
            "pid": registration.pid,
        }
        note(log, logging.INFO, "suspect", facts)
        self._books.emit("suspect", **facts)

    def _on_exit(self, peer: Peer) -> None:
        """The process ended: proof. What is pending from it means nothing any more."""
        record = peer.record
        ended = read_exit(peer.pidfd, None if record is None else record.pid)
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
        books.end_leases(record.secret_hash)

    def _forget(self, peer: Peer) -> None:
        """Close all that is held for a connection and its process."""
        self._peers.discard(peer)
        self._close_socket(peer)
        if peer.pidfd >= 0:
            self._loop.remove_reader(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = -1
        record = peer.record
        if record is not None:
            record.open = False
            record.table.close()
            del self._books.tethers[record.secret_hash]
            del self._by_secret[record.secret_hash]
            peer.record = None

    def _close_socket(self, peer: Peer) -> None:
        sock, peer.sock = peer.sock, None
        if sock is not None:
            self.connections -= 1
            self._loop.remove_reader(sock.fileno())
            with contextlib.suppress(OSError):  # the other end is gone already
                sock.shutdown(socket.SHUT_RDWR)
            self._discard([sock.detach()])


def _check_whole(flags: int) -> None:
    """Refuse a packet that did not fit: what it brought is not all that was sent."""
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise InvalidPayload(
            f"a packet was cut off: send at most {MAX_PACKET_BYTES} bytes and {MAX_FDS} descriptors", most=MAX_FDS
        )
