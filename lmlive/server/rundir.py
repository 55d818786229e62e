"""Every name in the file system that a server owns: its run directory, its locks, its unix sockets.

Not a transport: it makes the listening sockets and gives them away. The rule it keeps: a path is bound or unlinked
only while this process holds the lock of that path, so two servers never take a socket from each other, and what a
killed one left behind never stops a start. A socket is born with its mode, and the process's umask is not touched: 0600
in a directory of 0700, or, where other users are let in, 0666 in one of 0711. Then a socket keeps nobody out, and
whoever accepts there asks the kernel whose connection it is.

Not for the loop thread: all of it asks the file system. One thread at a time, any.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import weakref
from pathlib import Path

from lmlive.config.addresses import UNIX_PATH_BYTES
from lmlive.errors import StartError

log = logging.getLogger("lmlive.server")

_BACKLOG = 1024
_FIRST_BACKLOG = 8
_OTHERS_WRITE = 0o022
_PRIVATE = 0o700
_SHARED = 0o711
_SO_PASSRIGHTS = 83
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW


class Lock:
    """A lock file, held until ``close``; the process that holds it writes its pid into it.

    The file itself stays: were it unlinked, two processes could each hold the lock of a file of that name.

    Args:
        path: The lock file.
        what: What it guards, for the error's text.
        directory: An open directory to look the file's name up in; None: the path is used as it is.
    """

    def __init__(self, path: Path, what: str, directory: int | None = None) -> None:
        self.path = path
        name = path if directory is None else path.name
        try:
            self._fd = os.open(name, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=directory)
        except OSError as error:
            raise StartError(f"cannot open the lock {path}: {error.strerror}", path=str(path)) from error
        try:
            self._acquire(what)
        except BaseException:
            os.close(self._fd)
            raise

    def _acquire(self, what: str) -> None:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise StartError(f"the lock {self.path} is not a file of ours: remove it", path=str(self.path))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise StartError(f"cannot lock {self.path}: {error.strerror}", path=str(self.path)) from error
            text = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            pid = int(text) if text.isdigit() else None
            raise StartError(
                f"{what} is in use by process {pid or 'unknown'}: stop it, or choose another",
                path=str(self.path),
                pid=pid,
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let go of the lock, also of copies that forked children hold; twice is once."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the descriptor alone: a forked child must not keep its parent's lock alive, nor end it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class RunDir:
    """The run directory of one server and the unix sockets that it listens on, there or elsewhere.

    Lifecycle: ``open`` makes the directory and locks it, ``stream`` and ``tether`` bind, ``close`` unlinks and
    unlocks. In a forked child ``close`` does nothing, and the child's copies of locks and listening sockets are closed
    at the fork, so that a server's successor never finds them held by a child that outlived it.

    Args:
        path: The directory; made if it is missing, its parent is not.
        shared: Let other users reach the sockets; whoever accepts there must look who they are.
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False) -> None:
        self.path = Path(path).absolute()
        self._shared = shared
        self._mode = _SHARED if shared else _PRIVATE
        self._pid = os.getpid()
        self._fd = -1
        self._locks: dict[Path, Lock] = {}
        self._bound: dict[Path, tuple[int, int, int]] = {}
        self._listening: list[tuple[weakref.ref[socket.socket], int, int]] = []

    def __repr__(self) -> str:
        """Name the directory and what is bound."""
        return f"<RunDir {self.path} bound={[path.name for path in self._bound]}>"

    def open(self) -> None:
        """Make or check the directory and lock it.

        Raises:
            StartError: Another server holds it (field ``pid``), or it cannot be trusted: a symlink, not ours, or
                writable for others.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            _check_parent(self.path)
            try:
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir(mode=_PRIVATE)
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
            except OSError as error:
                strange = error.errno in (errno.ELOOP, errno.ENOTDIR)
                reason = "it is a symlink, or no directory" if strange else error.strerror
                raise StartError(f"cannot use the run directory {self.path}: {reason}", path=str(self.path)) from error
            self._check_directory()
            lock = Lock(self.path / "lock", f"the run directory {self.path}", self._fd)
            self._locks[lock.path] = lock
            _ALIVE.add(self)
            undo.pop_all()

    def stream(self, path: Path) -> socket.socket:
        """Give a listening stream socket at ``path``, to be handed to libzmq.

        Few connections may wait there until it is: libzmq would take them all in at once. The router lets more wait
        as soon as it can hold them back.

        Raises:
            StartError: The path is in use or cannot be bound.
        """
        self._lock(path)
        sock = self._bind(path, socket.SOCK_STREAM, _FIRST_BACKLOG)
        with contextlib.suppress(OSError):  # Linux before 6.16
            # Nobody takes descriptors there: libzmq's thread would close them, and may wait in that for their sender.
            sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
        barrier = _barrier(path) if self._shared else None
        if barrier is not None:
            log.warning("other users may not reach %s: %s lets them not through (chmod o+x)", path, barrier)
        return sock

    def tether(self, path: Path) -> socket.socket:
        """Give a listening SEQPACKET socket at ``<path>.tether``, under the lock of ``path``.

        Raises:
            StartError: The path is in use or cannot be bound.
        """
        self._lock(path)
        return self._bind(path.with_name(f"{path.name}.tether"), socket.SOCK_SEQPACKET)

    def close(self) -> None:
        """Unlink what was bound, let go of all locks; twice is once, and nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        _ALIVE.discard(self)
        while self._bound:
            path, identity = self._bound.popitem()
            with contextlib.suppress(FileNotFoundError):
                if _identity(path) == identity:
                    path.unlink()
        self._listening.clear()
        while self._locks:
            self._locks.popitem()[1].close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_directory(self) -> None:
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid():
            raise StartError(f"the run directory {self.path} belongs to uid {found.st_uid}: choose another")
        if found.st_mode & (_OTHERS_WRITE | stat.S_ISVTX):
            raise StartError(f"the run directory {self.path} is writable for others: chmod 700 it, or choose another")
        mode = stat.S_IMODE(found.st_mode)
        # Ours and merely readable, as a service manager makes it. One that holds other things is not narrowed, unless
        # a server left it so.
        if mode & 0o077 and mode != _SHARED and {path.name for path in self.path.iterdir()} - {"lock"}:
            raise StartError(
                f"the run directory {self.path} is open to others: chmod {self._mode:o} it, or choose another"
            )
        if mode != self._mode:
            os.fchmod(self._fd, self._mode)

    def _lock(self, path: Path) -> None:
        name = path.with_name(f"{path.name}.lock")
        if name not in self._locks:
            if path.parent != self.path:
                _check_parent(path)
            self._locks[name] = Lock(name, f"the socket {path}")

    def _bind(self, path: Path, kind: socket.SocketKind, backlog: int = _BACKLOG) -> socket.socket:
        if len(os.fsencode(path)) > UNIX_PATH_BYTES:
            raise StartError(f"the socket path {path} is longer than {UNIX_PATH_BYTES} bytes: choose a shorter one")
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            _remove_stale(path, kind)
            # Linux gives the name the socket's own mode, less the umask: it is never wider.
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(os.fspath(path))
            if self._shared:
                path.chmod(0o666)
            self._bound[path] = _identity(path)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            raise StartError(f"cannot bind {path}: {error.strerror or error}", path=str(path)) from error
        except BaseException:
            sock.close()
            raise
        self._listening.append((weakref.ref(sock), sock.fileno(), os.fstat(sock.fileno()).st_ino))
        return sock

    def forget(self) -> None:
        """Close the copies that a forked child has of what its parent holds."""
        for lock in self._locks.values():
            lock.forget()
        for reference, fd, inode in self._listening:
            sock = reference()
            if sock is not None and sock.fileno() == fd:
                sock.close()
                continue
            with contextlib.suppress(OSError):  # libzmq owns it, or has closed it
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)


def _check_parent(path: Path) -> None:
    """Refuse a place where any user may swap the name under our feet."""
    try:
        parent = path.parent.stat()
    except OSError as error:
        raise StartError(f"cannot use {path}: {error.strerror}", path=str(path)) from error
    if not stat.S_ISDIR(parent.st_mode):
        raise StartError(f"cannot use {path}: {path.parent} is no directory", path=str(path))
    if parent.st_mode & 0o002 and not parent.st_mode & stat.S_ISVTX:
        raise StartError(f"cannot use {path}: any user may rename things in {path.parent}", path=str(path))


def _barrier(path: Path) -> Path | None:
    """Give the first directory on the way to a path through which not everybody may go."""
    for parent in reversed(path.absolute().parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            return parent
    return None


def _remove_stale(path: Path, kind: socket.SocketKind) -> None:
    """Unlink the socket that a killed server left; the lock of ``path`` is held."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise StartError(f"{path} is not a socket of ours: remove it, or choose another", path=str(path))
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        outcome = probe.connect_ex(os.fspath(path))
    # A program that does not know our lock may listen there.
    if outcome != errno.ECONNREFUSED:
        raise StartError(f"{path} is in use by another program: stop it, or choose another", path=str(path))
    path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_mtime_ns  # inode numbers are used again at once


_ALIVE: weakref.WeakSet[RunDir] = weakref.WeakSet()


def _after_fork() -> None:
    for run_dir in list(_ALIVE):
        run_dir.forget()


os.register_at_fork(after_in_child=_after_fork)
