"""The tether: a unix socket per worker process, over which descriptors come in and the process's end is seen.

The server greets first. A worker then says who it is and sends descriptors, batch by batch; each batch gets its
receipt, or a typed error. A server that is short of descriptors or of room says so and leaves a tether that already
stands for a process as it is: its end would be a suspicion that nobody gave reason for.

Not what an offer means: that is ``lmlive.server.peers``. Loop thread only.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from functools import partial

from lmlive.errors import (
    InternalError,
    InvalidHandle,
    InvalidPayload,
    LMLiveError,
    NotOwner,
    ServerBusy,
    ServerStarting,
)
from lmlive.modules.books import Books
from lmlive.modules.tethers import Discard, close_all
from lmlive.protocol.tether import (
    MAX_FDS,
    MAX_PACKET_BYTES,
    Greeting,
    Offer,
    PoolGrant,
    Receipt,
    decode_word,
    encode_refusal,
)
from lmlive.server.evidence import ANCILLARY_BYTES, Sender, ask_for_sender, peer_uid, read_sender
from lmlive.server.peers import Peer, Peers
from lmlive.server.turn import Turn
from lmlive.server.turnstile import need_descriptors, spare_descriptors

log = logging.getLogger("lmlive.server")

_RETRY_AFTER = 1.0
_ACCEPTS_AT_ONCE = 64
_ACCEPT_AGAIN = 0.1
_SAY_AGAIN_SECONDS = 10.0
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Received = tuple[bytes, list[tuple[int, int, bytes]], int, object]
"""A packet, what came beside it, flags, and an address that says nothing."""

DropPacket = Callable[[socket.socket, Callable[[], None]], None]


class Tethers:
    """Listens, and keeps the books told.

    Lifecycle: ``take`` gives it its sockets, ``open`` begins to listen, ``close`` closes every socket and descriptor
    that is still here.

    Args:
        books: The server's state.
        discard: Closes sockets in which descriptors may wait unread, and descriptors of whatever kind.
        drop_packet: Reads a packet with all that comes beside it, drops it and calls back, on the loop.
    """

    def __init__(self, books: Books, discard: Discard, drop_packet: DropPacket) -> None:
        self._turn = Turn(asyncio.get_running_loop(), books.clock)
        self.peers = Peers(books, discard, self._turn)
        self.refused = 0
        self._books = books
        self._discard = discard
        self._drop_packet = drop_packet
        self._listeners: list[socket.socket] = []
        self._loop = asyncio.get_running_loop()
        self._most_peers = books.config.max_connections
        self._failed_accepts = 0
        self._said_at = -_SAY_AGAIN_SECONDS

    @property
    def connections(self) -> int:
        """How many tethers stand."""
        return self.peers.connections

    def take(self, listener: socket.socket) -> None:
        """Own a listening SEQPACKET socket from now on."""
        self._listeners.append(listener)

    def open(self, most: int) -> None:
        """Begin to listen, for so many tethers at most."""
        self._most_peers = most
        for listener in self._listeners:
            self._listen(listener)

    def close(self) -> None:
        """Close everything; twice is once."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        self.peers.close()

    def sweep(self) -> None:
        """End what waited too long."""
        self.peers.sweep()

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
                    self._say_failed(error)
                    # The listener stays readable: without a pause the loop would spin on it.
                    self._loop.remove_reader(listener.fileno())
                    self._loop.call_later(_ACCEPT_AGAIN, self._listen, listener)
                    return
                continue
            self._greet(sock)

    def _say_failed(self, error: OSError) -> None:
        self._failed_accepts += 1
        now = self._loop.time()
        if now - self._said_at >= _SAY_AGAIN_SECONDS:  # it goes on for as long as descriptors are short
            self._said_at = now
            log.error("tether accept failed error=%s failures=%d", error, self._failed_accepts)

    def _greet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if self.connections >= self._most_peers:
            busy = ServerBusy("too many tethers: come again", retry_after=_RETRY_AFTER, limit=self._most_peers)
            self._refuse(sock, busy)
            self._discard([sock.detach()])
            return
        try:
            self.peers.check_user(peer_uid(sock))  # as each offer's sender is: it may be another process
            started = ask_for_sender(sock)  # before the greeting: whoever answers it is named
            sock.send(Greeting(self._books.epoch).encode())
        except NotOwner as error:
            self._refuse(sock, error)
            self._discard([sock.detach()])
            return
        except OSError:
            self._discard([sock.detach()])
            return
        peer = self.peers.add(sock, started)
        self._loop.add_reader(sock.fileno(), self._on_packet, peer, sock)

    def _refuse(self, sock: socket.socket, error: LMLiveError) -> None:
        self.refused += 1
        self._books.errors[type(error).__name__] += 1
        with contextlib.suppress(OSError):  # it is gone, or does not read
            sock.send(encode_refusal(error))

    def _on_packet(self, peer: Peer, sock: socket.socket) -> None:
        if self._turn.now():
            self._read(peer, sock)
        else:
            self._loop.remove_reader(sock.fileno())
            self._turn.queue(partial(self._read_later, peer, sock))

    def _read_later(self, peer: Peer, sock: socket.socket) -> None:
        if peer.sock is sock:  # it was not closed meanwhile
            self._loop.add_reader(sock.fileno(), self._on_packet, peer, sock)
            self._read(peer, sock)

    def _read(self, peer: Peer, sock: socket.socket) -> None:
        if not spare_descriptors(MAX_FDS):
            self._refuse_unread(peer, sock)
            return
        try:
            received = sock.recvmsg(MAX_PACKET_BYTES, ANCILLARY_BYTES, _FLAGS)
        except BlockingIOError:
            return
        except OSError:
            self.peers.lose(peer)
            return
        if not received[0] and not received[1]:
            self.peers.lose(peer)
            return
        sender = Sender()
        try:
            self._answer(peer, sock, received, sender)
        except LMLiveError as error:
            self._refuse(sock, error)
            if peer.record is None or not isinstance(error, ServerBusy):
                self.peers.lose(peer)
        except OSError:  # it does not read its receipts
            self.peers.lose(peer)
        except Exception:
            log.exception("tether failed")
            self._refuse(sock, InternalError("the server failed on this offer, see its log"))
            self.peers.lose(peer)
        finally:
            self._discard(sender.take_fds())
            sender.close()

    def _refuse_unread(self, peer: Peer, sock: socket.socket) -> None:
        """Refuse what there are no descriptors for.

        The kernel closes what has no place as it gives the packet out, which may wait: so that is done elsewhere.
        """
        self._loop.remove_reader(sock.fileno())
        self._drop_packet(sock, partial(self._refused_unread, peer, sock))

    def _refused_unread(self, peer: Peer, sock: socket.socket) -> None:
        if peer.sock is not sock:  # it was closed meanwhile
            return
        self._refuse(sock, ServerBusy("too few descriptors are left here: come again", retry_after=_RETRY_AFTER))
        if peer.record is None:
            self.peers.lose(peer)
        else:
            self._loop.add_reader(sock.fileno(), self._on_packet, peer, sock)

    def _answer(self, peer: Peer, sock: socket.socket, received: Received, sender: Sender) -> None:
        """Take an offer, or give the pool."""
        packet, ancillary, flags, _ = received
        read_sender(sock, ancillary, sender, peer.started)
        _check_whole(flags)
        word = decode_word(packet)
        if isinstance(word, Offer):
            sock.send(Receipt(self.peers.take_offer(peer, word, sender)).encode())
            return
        try:
            fds = self.peers.give_pool(peer, word, sender)
        except (InvalidHandle, ServerStarting) as error:
            self._refuse(sock, error)  # there are other ways to copy: the tether stands on
            return
        try:
            socket.send_fds(sock, [PoolGrant(self._books.config.pool_bytes, len(fds)).encode()], fds)
        finally:
            close_all(fds)


def _check_whole(flags: int) -> None:
    """Refuse a packet that did not fit: what it brought is not all that was sent."""
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        raise InvalidPayload(
            f"a packet was cut off: send at most {MAX_PACKET_BYTES} bytes and {MAX_FDS} descriptors", most=MAX_FDS
        )
