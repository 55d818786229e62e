"""Arguments of a worker's and a scheduler's constructor, checked at once. Pure."""

import os
from collections.abc import Mapping
from typing import Any

from lmlive.config.addresses import UNIX_PATH_BYTES
from lmlive.errors import InvalidArgument
from lmlive.protocol.codec import MAX_TEXT_BYTES
from lmlive.protocol.transfers import MAX_RANKS

MAX_PORT = 65535


def check_url(url: Any) -> None:
    """Refuse what is no address of a server."""
    scheme, _, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in {"ipc", "tcp"} or not rest:
        raise InvalidArgument("url must be ipc:///path or tcp://host:port", field="url", value=repr(url))
    if scheme == "ipc" and len(os.fsencode(rest)) > UNIX_PATH_BYTES:
        raise InvalidArgument(f"the path of an ipc url has at most {UNIX_PATH_BYTES} bytes", field="url", value=url)
    port = rest.rpartition(":")[2]
    if scheme == "tcp" and not (port.isdecimal() and 0 < int(port) <= MAX_PORT):
        raise InvalidArgument(f"a tcp url must end with a port from 1 to {MAX_PORT}", field="url", value=url)


def check_caches(kv_caches: Any) -> list[Mapping[str, Any]]:
    """Refuse what is neither a dict of tensors nor a list of such dicts; what is in them is the layout's business."""
    listed = [kv_caches] if isinstance(kv_caches, Mapping) else kv_caches
    if not isinstance(listed, (list, tuple)) or not all(isinstance(group, Mapping) for group in listed):
        raise InvalidArgument(
            "kv_caches must be a dict of name -> tensor, or a list of such dicts, one for each KV group",
            field="kv_caches",
            value=type(kv_caches).__name__,
        )
    return list(listed)


def check_identity(model: Any, revision: Any, rank: Any, world_size: Any) -> None:
    """Refuse a model, revision, rank or world size that no server would take."""
    check_text("model", model)
    check_text("revision", revision)
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise InvalidArgument(f"world_size must be an int from 1 to {MAX_RANKS}", field="world_size", value=world_size)
    if type(rank) is not int or not 0 <= rank < world_size:
        raise InvalidArgument(f"rank must be an int from 0 to {world_size - 1}", field="rank", value=rank)


def check_lease(lease: Any) -> str | None:
    """Refuse what is no lease; None is none."""
    if lease is not None:
        check_text("lease", lease)
    return lease if lease is None else str(lease)


def check_text(field: str, text: Any) -> None:
    """Refuse what is no text, or too long to travel."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{field} must be a str", field=field, value=repr(text))
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field} must be valid unicode text", field=field, value=repr(text)) from None
    if size > MAX_TEXT_BYTES:
        raise InvalidArgument(f"{field} has {size} bytes but at most {MAX_TEXT_BYTES} may travel", field=field)
