"""Why nobody answers, as far as the file system tells. Blocks: not for a loop."""

import os
from pathlib import Path

from lmlive.errors import NotOwner


def refused_by_files(url: str) -> NotOwner | None:
    """Tell whether this user may not even reach a server's socket; None if it may, or if there is none."""
    if not url.startswith("ipc://"):
        return None
    path = url.removeprefix("ipc://")
    try:
        Path(path).stat()
    except PermissionError:
        return _refusal(path)
    except OSError:
        return None
    return None if os.access(path, os.W_OK, effective_ids=True) else _refusal(path)


def _refusal(path: str) -> NotOwner:
    uid, owner = os.geteuid(), _owner(Path(path))
    whose = "" if owner is None else f" of uid {owner}"
    detail = f"uid {uid} may not use {path}{whose}: run both as one user, or start the server with --allow-uid {uid}"
    return NotOwner(detail, uid=uid, owner=owner)


def _owner(path: Path) -> int | None:
    """Give whose a path is, or the nearest directory above it that lets itself be seen."""
    for one in (path, *path.parents):
        try:
            return one.stat().st_uid
        except OSError:
            continue
    return None
