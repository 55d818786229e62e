"""Addresses that a server may bind, judged by their text alone: nothing is resolved, opened or asked for.

An ipc path grows two neighbours, ``P.tether`` (a second socket) and ``P.lock``; the longest of the three must fit into
the 107 bytes that the kernel leaves for the path of a unix socket. TCP without keys cannot tell friend from foe, so it
is for this machine only, unless somebody says that it may be reached from elsewhere.
"""

import ipaddress
import os
import re

UNIX_PATH_BYTES = 107
SUFFIXES = (".tether", ".lock")
LONGEST_SUFFIX = max(SUFFIXES, key=len)

_HOST_PORT = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+):([0-9]{1,5})")
KEYLESS_RULE = (
    "a loopback address, as long as there are no keys; others need --curve-secret-key (curve_secret_key), or "
    "--insecure-bind (insecure_bind) where everybody who can reach it may do as they like"
)
_LOOPBACK_ONLY = "a loopback address: HTTP has no keys"

BIND_RULE = (
    f"ipc:///absolute/path (with {LONGEST_SUFFIX} at most {UNIX_PATH_BYTES} bytes; no @ and no * in place of it) "
    "or tcp://host:port (a loopback host, or any with --curve-secret-key or --insecure-bind; port 0 picks one), "
    "each once"
)
HTTP_RULE = "off or host:port (a loopback host; port 0 picks one)"


def bind_url(url: str) -> str:
    """Give a url that may be bound.

    Raises:
        ValueError: With a rule that says more than ``BIND_RULE``, or with none.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ValueError
    if scheme == "ipc":
        return "ipc://" + unix_path(rest)
    if scheme == "tcp":
        _split(rest)
        return url
    raise ValueError


def is_reached_from_elsewhere(url: str) -> bool:
    """Tell whether other machines may reach an address that may be bound: whether it is TCP and not loopback."""
    scheme, _, rest = url.partition("://")
    return scheme == "tcp" and not _is_loopback(_split(rest)[0])


def unix_path(path: str) -> str:
    """Give a path at which a unix socket and its neighbours can be."""
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError
    try:
        length = len(os.fsencode(path + LONGEST_SUFFIX))
    except UnicodeEncodeError:
        raise ValueError from None
    if length > UNIX_PATH_BYTES:
        raise ValueError(f"shorter: {path}{LONGEST_SUFFIX} has {length} bytes, a unix socket at most {UNIX_PATH_BYTES}")
    return path


def http_endpoint(value: object) -> str:
    """Give an address for HTTP, or "off"."""
    if not isinstance(value, str):
        raise ValueError
    if value != "off":
        split_loopback(value)
    return value


def split_loopback(address: str) -> tuple[str, int]:
    """Split host:port of this machine's loopback; an IPv6 host stands in brackets and is given without them."""
    host, port = _split(address)
    if not _is_loopback(host):
        raise ValueError(_LOOPBACK_ONLY)
    return host, port


def _split(address: str) -> tuple[str, int]:
    match = _HOST_PORT.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ValueError
    return match[1].strip("[]"), int(match[2])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False
