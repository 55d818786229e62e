"""Second tiers as text, and quotas: judged by their text alone, nothing is asked of a disk or a network."""

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from lmlive.config.settings import bytes_of, parse_switch

TIER_RULE: Final = (
    "file:///absolute/directory?size=10GiB or valkey://[user:password@]host:port/database?ttl=86400 (also valkeys://; "
    "with size=10GiB, timeout=0.5, cluster=true, prefix=lmlive), each once, at most 4"
)
MOST_TIERS: Final = 4
QUOTA_RULE: Final = "SALT=BYTES, as tenant-a=4GiB, each salt once"
LONGEST_TTL: Final = 10 * 365 * 86_400

_PASSWORD_OPTION: Final = re.compile("password=[^&]*", re.IGNORECASE)
_VALKEY_SCHEMES: Final = ("valkey", "valkeys", "redis", "rediss")


@dataclass(frozen=True, slots=True)
class DirectoryPlace:
    """A directory as second tier.

    Args:
        path: Absolute.
        most_bytes: What its files may come to.
    """

    path: str
    most_bytes: int = 10 << 30


@dataclass(frozen=True, slots=True)
class ValkeyPlace:
    """A Valkey or Redis server, or a cluster of them, as second tier.

    Args:
        host: Name or address.
        port: Of one server, or of any of a cluster.
        database: By number; 0 in a cluster.
        username: Or None.
        password: Or None; never shown.
        tls: Whether to encrypt.
        cluster: Whether the chunks are spread over a cluster.
        ttl: Seconds for which a chunk is kept.
        most_bytes: Nothing is saved while the servers hold more; None: as much as they take.
        timeout: Seconds for one answer.
        prefix: Begins each key.
    """

    host: str
    port: int = 6379
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    cluster: bool = False
    ttl: int = 86_400
    most_bytes: int | None = None
    timeout: float = 0.5
    prefix: str = "lmlive"


def tier_place(url: str) -> DirectoryPlace | ValkeyPlace:
    """Read a tier's url.

    Raises:
        ValueError: It is none.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if parts.fragment or len(options) != parts.query.count("=") or "\0" in unquote(url):
        raise ValueError
    if parts.scheme == "file":
        return _directory(parts.netloc, unquote(parts.path), options)
    if parts.scheme not in _VALKEY_SCHEMES or not parts.hostname:
        raise ValueError
    place = ValkeyPlace(
        host=parts.hostname,
        port=6379 if parts.port is None else parts.port,
        database=_whole(parts.path.removeprefix("/") or "0", 0, 10_000),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls=parts.scheme in {"valkeys", "rediss"},
        cluster=parse_switch(options.pop("cluster", "false")),
        ttl=_whole(options.pop("ttl", "86400"), 1, LONGEST_TTL),
        most_bytes=_size(options.pop("size")) if "size" in options else None,
        timeout=_seconds(options.pop("timeout", "0.5")),
        prefix=options.pop("prefix", "lmlive"),
    )
    if options or (place.cluster and place.database) or not place.prefix or set("{}") & set(place.prefix):
        raise ValueError
    return place


def tier_url(url: str) -> str:
    """Give a tier's url as it may be kept.

    Raises:
        ValueError: It is none.
    """
    tier_place(url)
    return url


def without_password(url: str) -> str:
    """Give a tier's url, or what was meant to be one, as it may be shown."""
    url = _PASSWORD_OPTION.sub("password=...", url)  # other clients take one there: it is refused, and not shown either
    credentials, at, place = url.rpartition("@")
    if not at:
        return url
    scheme, separator, user = credentials.rpartition("://")
    return f"{scheme}{separator}{user.partition(':')[0]}:...@{place}"


def quota(text: str) -> str:
    """Give a quota as it may be kept.

    Raises:
        ValueError: It is none.
    """
    quota_of(text)
    return text


def quota_of(text: str) -> tuple[str, int]:
    """Split a quota into salt and bytes; a salt may have signs of equality.

    Raises:
        ValueError: It is none.
    """
    salt, separator, most = text.rpartition("=")
    if not separator or not salt:
        raise ValueError
    return salt, _size(most)


def _directory(host: str, path: str, options: dict[str, str]) -> DirectoryPlace:
    place = DirectoryPlace(path, _size(options.pop("size", "10GiB")))
    if host not in {"", "localhost"} or not path.startswith("/") or path == "/" or options:
        raise ValueError
    return place


def _size(text: str) -> int:
    if not (found := bytes_of(text)):
        raise ValueError
    return found


def _whole(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise ValueError
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.001 <= seconds <= 60.0:  # nan fails here
        raise ValueError
    return seconds
