"""Keys in files: certificates as ``zmq.auth.create_certificates`` writes them, read and judged.

A certificate is a small text with a line ``public-key = "..."`` and, in the secret half, ``secret-key = "..."``; a key
is 40 characters of Z85, 32 bytes. A server's secret is refused where others may read it, for with it they could be the
server; a worker's is warned of. Nothing here makes a key or uses one: whoever connects or binds does.

Blocks for as long as a small file takes to read. Any thread.
"""

import base64
import logging
import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from lmlive.errors import ConfigError

KEY_CHARACTERS: Final = 40
SERVER_KEY_RULE: Final = f"the server's public key ({KEY_CHARACTERS} characters), or the file of its public certificate"
OWN_KEY_RULE: Final = "a file with a secret key, as zmq.auth.create_certificates makes it"

_log = logging.getLogger("lmlive.config")

_LINE: Final = re.compile(r"""\s*(public|secret)-key\s*=\s*["']?(.*?)["']?\s*""")
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_B85: Final = str.maketrans(_Z85 + "".join(set(_B85) - set(_Z85)), _B85 + " " * len(set(_B85) - set(_Z85)))
_LONGEST_FILE: Final = 65_536
_OTHERS: Final = 0o077
_THROUGH: Final = 0o011
_ROOTS_GROUP: Final = 0o040
"""A secret that root owns may be lent to a group: so service managers and orchestrators mount them."""


class Certificate(NamedTuple):
    """One pair of keys, or the public half of it; each key in Z85."""

    public: bytes
    secret: bytes | None = None

    def __repr__(self) -> str:
        """Show the public half alone."""
        return f"Certificate({self.public.decode()})"


class ClientKeys(NamedTuple):
    """What a connection over TCP needs where the server asks for keys.

    Args:
        server: The server's public key, in Z85.
        own: This side's pair; None: one is made for each connection.
    """

    server: bytes
    own: Certificate | None = None


def raw_key(key: bytes | str) -> bytes:
    """Give the 32 bytes of a key in Z85.

    Raises:
        ValueError: It is none.
    """
    text = key.decode("ascii", "replace") if isinstance(key, bytes) else key
    if len(text) != KEY_CHARACTERS:
        raise ValueError
    return base64.b85decode(text.translate(_TO_B85).encode("ascii"))


def read_certificate(path: str | Path) -> Certificate:
    """Read a certificate.

    Raises:
        OSError: It cannot be read.
        ValueError: It is none.
    """
    with Path(path).open("rb") as file:
        return _parse(file.read(_LONGEST_FILE))


def server_certificate(path: str | Path) -> Certificate:
    """Read a server's own pair of keys.

    Raises:
        ConfigError: It cannot be read, has no secret, or others may read it; names the file.
    """
    certificate, is_private = _read_secret(path)
    if not is_private:
        raise _refusal("curve_secret_key", path, f"a file that nobody else may read: chmod 600 {path}")
    return certificate


def client_keys(secret_file: str | Path | None, server_key: str | Path | None) -> ClientKeys | None:
    """Read what connecting needs; None where no server's key is given, because then nothing is encrypted.

    Args:
        secret_file: A certificate with its secret half; None: a new pair for each connection.
        server_key: The file of the server's public certificate, or the key itself.

    Raises:
        ConfigError: A file cannot be read or is none of these; names it.
    """
    if not server_key:
        return None
    own = None
    if secret_file:
        own, is_private = _read_secret(secret_file)
        if not is_private:
            _log.warning("others may read the secret key in %s: chmod 600 it", secret_file)
    return ClientKeys(_server_key(str(server_key)), own)


def _read_secret(path: str | Path) -> tuple[Certificate, bool]:
    """Read a certificate with its secret half, and tell whether nobody else may.

    A file that others might read is private all the same in a directory that lets only its owner through: the common
    tool that makes certificates leaves them readable.
    """
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            shielded = not Path(path).resolve().parent.stat().st_mode & _THROUGH
            certificate = _parse(file.read(_LONGEST_FILE))
    except OSError as error:
        raise _refusal("curve_secret_key", path, f"{OWN_KEY_RULE}: {error.strerror}") from error
    except ValueError as error:
        raise _refusal("curve_secret_key", path, OWN_KEY_RULE) from error
    if certificate.secret is None:
        raise _refusal("curve_secret_key", path, f"{OWN_KEY_RULE}: this one has the public key alone")
    lent = _ROOTS_GROUP if found.st_uid == 0 and os.geteuid() != 0 else 0
    return certificate, shielded or not found.st_mode & _OTHERS & ~lent


def _server_key(given: str) -> bytes:
    try:
        raw_key(given)
    except ValueError:
        pass
    else:
        return given.encode("ascii")
    try:
        return read_certificate(given).public
    except OSError as error:
        raise _refusal("curve_server_key", given, f"{SERVER_KEY_RULE}: {error.strerror}") from error
    except ValueError as error:
        raise _refusal("curve_server_key", given, SERVER_KEY_RULE) from error


def _parse(text: bytes) -> Certificate:
    found: dict[str, bytes] = {}
    for line in text.decode("ascii", "replace").splitlines():
        if match := _LINE.fullmatch(line):
            raw_key(match[2])
            found.setdefault(match[1], match[2].encode("ascii"))
    if "public" not in found:
        raise ValueError
    return Certificate(found["public"], found.get("secret"))


def _refusal(field: str, value: object, rule: str) -> ConfigError:
    return ConfigError(f"{field} is {str(value)!r} but must be {rule}", field=field, value=str(value), rule=rule)
