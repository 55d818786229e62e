"""Files that somebody named for us to keep things in: ours alone, and one server's at a time.

Any thread; opening may wait for a disk.
"""

import fcntl
import os
import stat
from pathlib import Path

from lmlive.errors import StartError


def open_private(path: Path) -> int:
    """Open a file of ours for reading and writing, made if it is not there.

    Raises:
        StartError: It is a link, another one's, or no file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise StartError(f"pool_file: {path} cannot be opened: {error.strerror}", errno=error.errno) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
        os.close(fd)
        raise StartError(f"pool_file: {path} must be a file of this user, with one name, and no link")
    os.fchmod(fd, 0o600)
    return fd


def lock_for_life(fd: int, path: Path) -> None:
    """Lock a file for as long as it is open; the lock ends with the process, however that ends.

    Raises:
        StartError: Another server has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StartError(f"pool_file: {path} is another server's: give each server its own") from None
