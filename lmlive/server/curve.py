"""Who may come in over TCP with keys: this server's own pair, and the list of those that it knows.

libzmq does the cryptography, and refuses whoever does not know this server's public key. What is left to decide is
whether a peer's key is welcome. The rule: a peer is judged by a reading of the directory that began after it asked, so
a certificate that was put there or taken away counts for the next connection, without a signal and without a restart.
Whoever asks while one reading runs shares the next. A connection that stands is not ended by any of this.

Loop thread, except what says otherwise: files are read in a thread, because nothing may hold up the loop.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import zmq

from lmlive.config import ServerConfig
from lmlive.config.addresses import is_reached_from_elsewhere
from lmlive.config.keys import Certificate, ClientKeys, raw_key, read_certificate, server_certificate
from lmlive.errors import ConfigError
from lmlive.server.lanes import in_thread

log = logging.getLogger("lmlive.server")

SUFFIX: Final = ".key"
"""Of the files in the directory that are looked at: so public certificates are named, and secret ones are not."""

_Signature = tuple[int, int, int]


class DoorKeys(NamedTuple):
    """What a server's door needs for TCP with keys.

    Args:
        own: This server's pair.
        authorized: Where the certificates of welcome peers are; None: whoever knows our public key is welcome.
    """

    own: Certificate
    authorized: Path | None = None

    def dress(self, sock: zmq.Socket[bytes], *, on: bool) -> None:
        """Have the next bind ask for keys, or not."""
        if on:
            sock.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret or b"")
        sock.setsockopt(zmq.CURVE_SERVER, int(on))

    @property
    def for_ourselves(self) -> ClientKeys:
        """With what this server connects to itself: its own key is always welcome."""
        return ClientKeys(self.own.public, self.own)


def door_keys(config: ServerConfig) -> DoorKeys | None:
    """Read a server's keys, which blocks; None where it has none.

    Raises:
        ConfigError: A file or the directory cannot be used; names it.
    """
    if config.curve_secret_key is None:
        return None
    try:
        own = server_certificate(config.curve_secret_key)
    except ConfigError as error:
        raise config.refusal("curve_secret_key", error.rule) from error
    directory = config.curve_authorized_keys
    if directory is not None:
        try:
            _, faults = CertificateReader(directory).read()
        except OSError as error:
            raise config.refusal("curve_authorized_keys", f"a directory that can be read: {error.strerror}") from error
        for path, fault in faults.items():
            raise config.refusal("curve_authorized_keys", f"a directory of certificates: {path} is none: {fault}")
    return DoorKeys(own, directory)


def open_doors(urls: Iterable[str], keys: DoorKeys | None) -> list[str]:
    """Say who may come in by the addresses of a server that nobody may have thought of."""
    over_tcp = [url for url in urls if url.startswith("tcp://")]
    if not over_tcp:
        return []
    if keys is not None:
        unlisted = "curve without authorized keys: whoever knows this server's public key may come in"
        return [] if keys.authorized is not None else [unlisted]
    if any(map(is_reached_from_elsewhere, over_tcp)):
        who = "whoever can reach the address"
        return [f"tcp without keys, and not on this machine alone: {who} may register, look up and ask for the status"]
    return ["tcp without keys: every user of this machine may register, look up and ask for the status"]


class CertificateReader:
    """Reads a directory of public certificates again and again; what did not change is not opened again.

    One thread at a time, any; blocks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[_Signature, bytes]] = {}

    def read(self) -> tuple[frozenset[bytes], dict[str, str]]:
        """Give the keys, 32 bytes each, and what is wrong with files that have none.

        Raises:
            OSError: The directory cannot be read.
        """
        known: dict[str, tuple[_Signature, bytes]] = {}
        faults: dict[str, str] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    try:
                        known[entry.path] = self._read_one(entry)
                    except OSError as error:
                        faults[entry.path] = error.strerror or type(error).__name__
                    except ValueError:
                        faults[entry.path] = "it has no public key"
        self._known = known
        return frozenset(key for _, key in known.values()), faults

    def _read_one(self, entry: os.DirEntry[str]) -> tuple[_Signature, bytes]:
        found = entry.stat()
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        before = self._known.get(entry.path)
        if before is not None and before[0] == signature:
            return before
        return signature, raw_key(read_certificate(entry.path).public)


class GuestList:
    """Tells of each key whether it is welcome.

    Args:
        loop: The loop.
        keys: This server's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, keys: DoorKeys) -> None:
        self._loop = loop
        self._own = raw_key(keys.own.public)
        self._reader = None if keys.authorized is None else CertificateReader(keys.authorized)
        self._asked: list[tuple[bytes, Callable[[bool], None]]] = []
        self._reading: asyncio.Task[None] | None = None
        self._told: object = {}

    def ask(self, key: bytes, answer: Callable[[bool], None]) -> None:
        """Have a key judged; the answer is given at once, or after a reading. After ``close`` there is none."""
        if self._reader is None or key == self._own:
            answer(True)
            return
        self._asked.append((key, answer))
        if self._reading is None:
            self._reading = self._loop.create_task(self._read(self._reader), name="lmlive-authorized-keys")

    def close(self) -> None:
        """Answer nobody any more."""
        self._asked.clear()
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self, reader: CertificateReader) -> None:
        try:
            while self._asked:
                asked, self._asked = self._asked, []
                try:
                    welcome, faults = await in_thread(reader.read)
                except OSError as error:
                    welcome, faults = frozenset(), {"directory": error.strerror or type(error).__name__}
                self._tell(faults)
                for key, answer in asked:
                    answer(key in welcome)
        finally:
            self._reading = None

    def _tell(self, faults: dict[str, str]) -> None:
        """Say what cannot be read, once until that changes."""
        if faults != self._told:
            self._told = faults
            for path, fault in faults.items():
                log.warning("authorized key not read file=%s reason=%s: nobody comes in by it", path, fault)
