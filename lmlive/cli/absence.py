"""Says why nobody answers at an address, and what to do next.

It only looks: at the socket's path, at the tether and the lock beside it, at the process that holds the lock. What it
says may be outdated when it is read; nothing is decided by it.
"""

import contextlib
import fcntl
import os
import shlex
import socket
import stat
from pathlib import Path
from typing import Final

from lmlive.errors import LMLiveError, NotOwner
from lmlive.protocol.tether import MAX_PACKET_BYTES, decode_answer

_DEFAULT_NAME: Final = "router.sock"
_LOOK_SECONDS: Final = 0.5
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def no_server(url: str) -> str:
    """Explain why nothing could be connected to an address."""
    path = _path_of(url)
    refusal = None if path is None else _refusal(path)
    if refusal is not None:
        return f"refused by {url}: {refusal.message}"
    pid = None if path is None else _holder(path)
    if pid is not None:
        hint = _continue(pid) if _is_stopped(pid) else "its log says where it is bound, and what it does"
        return f"no answer from {url}: process {pid} holds this run dir and does not answer: {hint}"
    return f"no server at {url}: {(path and _obstacle(path)) or f'start one with: lmlive serve {_where(url, path)}'}"


def no_answer(url: str, message: str) -> str:
    """Explain why a server that was connected said nothing; ``message`` tells what was asked."""
    path = _path_of(url)
    pid = None if path is None else _holder(path)
    if pid is not None and _is_stopped(pid):
        return f"{message}: process {pid} is stopped: {_continue(pid)}"
    return f"{message}, it is stopped or overloaded: see its log, or give it more --timeout"


def _continue(pid: int) -> str:
    return f"continue it (kill -CONT {pid}) or end it"


def _obstacle(path: Path) -> str:
    """Give what is wrong with a socket's path, or nothing where a server can be started there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISSOCK(found.st_mode):
        return f"{path} is no socket"
    return "" if os.access(path, os.W_OK) else f"its socket belongs to uid {found.st_uid}: run this as that user"


def _refusal(path: Path) -> NotOwner | None:
    """Give what a server says over the tether beside its socket if it does not let this user in."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(_LOOK_SECONDS)
            sock.connect(f"{path}.tether")
            answer = decode_answer(sock.recv(MAX_PACKET_BYTES))
    except (OSError, LMLiveError):  # nobody is there; or we are greeted, which is no answer
        return None
    return answer if isinstance(answer, NotOwner) else None


def _where(url: str, path: Path | None) -> str:
    if path is not None and path.is_absolute() and path.name == _DEFAULT_NAME:
        return f"--run-dir {shlex.quote(str(path.parent))}"
    return f"--bind {shlex.quote(url)}"


def _path_of(url: str) -> Path | None:
    return Path(url.removeprefix("ipc://")) if url.startswith("ipc://") else None


def _holder(path: Path) -> int | None:
    """Give the process that holds the lock of a socket's path, or None where there is none that can be named."""
    try:
        lock = os.open(f"{path}.lock", _OPEN)
    except OSError:
        return None
    with contextlib.closing(os.fdopen(lock, "rb", buffering=0)) as file:
        text = (file.read(32) or b"").strip()
        # Whoever lets go of it empties it. A free lock is left alone: a server that starts now may want it.
        if not text.isdigit() or not Path(f"/proc/{int(text)}").exists():
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(text)
        except OSError:
            return None
        return None


def _is_stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    # The name comes before it, in parentheses, and may hold anything.
    return status.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])
