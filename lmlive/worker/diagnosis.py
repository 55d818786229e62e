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
    uid = os.geteuid()
    return NotOwner(f"uid {uid} may not use {path}: run both as one user, or let the server allow it", uid=uid)
