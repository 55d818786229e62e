"""Who owns a path, and what is left behind."""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmlive.config.addresses import UNIX_PATH_BYTES
from lmlive.errors import StartError
from lmlive.server.rundir import RunDir

HOLD = """
import sys
from pathlib import Path
from lmlive.server.rundir import RunDir
owned = RunDir(sys.argv[1])
owned.open()
for path in sys.argv[2:]:
    globals()[path] = owned.stream(Path(path)), owned.tether(Path(path))
print("held", flush=True)
sys.stdin.readline()
if sys.argv[2:]:
    owned.close()
"""


@pytest.fixture
def owned(run_dir: Path) -> Iterator[RunDir]:
    owned = RunDir(run_dir)
    owned.open()
    yield owned
    owned.close()


def hold(run_dir: Path, *paths: Path) -> subprocess.Popen[str]:
    """Let another process own a run directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir), *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_it_is_made_private(run_dir: Path) -> None:
    owned = RunDir(run_dir / "new")
    owned.open()
    assert (run_dir / "new").stat().st_mode & 0o7777 == 0o700
    assert int((run_dir / "new" / "lock").read_text()) == os.getpid()
    owned.close()
    owned.close()
    assert (run_dir / "new" / "lock").read_text() == ""


def test_a_parent_is_not_made(run_dir: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        RunDir(run_dir / "missing" / "new").open()


def test_held_by_another_process_the_error_names_it_until_it_is_killed(run_dir: Path) -> None:
    process = hold(run_dir)
    try:
        with pytest.raises(StartError, match=f"in use by process {process.pid}") as caught:
            RunDir(run_dir).open()
        assert caught.value.pid == process.pid
    finally:
        end(process)
    again = RunDir(run_dir)
    again.open()
    again.close()


def test_held_by_this_process_the_error_names_it(owned: RunDir) -> None:
    with pytest.raises(StartError, match=f"in use by process {os.getpid()}"):
        RunDir(owned.path).open()


def test_a_symlink_is_refused(run_dir: Path) -> None:
    (run_dir / "real").mkdir(mode=0o700)
    (run_dir / "link").symlink_to("real")
    with pytest.raises(StartError, match="symlink"):
        RunDir(run_dir / "link").open()
    assert list((run_dir / "real").iterdir()) == []


def test_a_file_is_refused(run_dir: Path) -> None:
    (run_dir / "file").touch()
    with pytest.raises(StartError, match="no directory"):
        RunDir(run_dir / "file").open()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720])
def test_a_directory_that_others_may_write_is_refused(run_dir: Path, mode: int) -> None:
    run_dir.chmod(mode)
    with pytest.raises(StartError, match="writable for others"):
        RunDir(run_dir).open()
    assert run_dir.stat().st_mode & 0o7777 == mode


def test_an_empty_directory_that_others_may_read_is_narrowed(run_dir: Path) -> None:
    run_dir.chmod(0o755)
    owned = RunDir(run_dir)
    owned.open()
    assert run_dir.stat().st_mode & 0o7777 == 0o700
    owned.close()


def test_a_directory_with_other_things_is_not_narrowed(run_dir: Path) -> None:
    (run_dir / "mine").touch()
    run_dir.chmod(0o755)
    with pytest.raises(StartError, match="open to others"):
        RunDir(run_dir).open()
    assert run_dir.stat().st_mode & 0o7777 == 0o755


def test_a_parent_where_any_user_may_rename_is_refused(run_dir: Path) -> None:
    run_dir.chmod(0o777)
    (run_dir / "mine").mkdir(mode=0o700)
    with pytest.raises(StartError, match="any user may rename"):
        RunDir(run_dir / "mine").open()
    run_dir.chmod(0o1777)
    owned = RunDir(run_dir / "mine")
    owned.open()
    owned.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give things away")
def test_what_belongs_to_another_user_is_refused(run_dir: Path) -> None:
    (run_dir / "theirs").mkdir(mode=0o700)
    os.chown(run_dir / "theirs", 12345, 12345)
    with pytest.raises(StartError, match="belongs to uid 12345"):
        RunDir(run_dir / "theirs").open()
    (run_dir / "mine").mkdir(mode=0o700)
    (run_dir / "mine" / "lock").touch()
    os.chown(run_dir / "mine" / "lock", 12345, 12345)
    with pytest.raises(StartError, match="not a file of ours"):
        RunDir(run_dir / "mine").open()


def test_a_lock_that_is_a_symlink_is_refused(run_dir: Path) -> None:
    (run_dir / "precious").write_text("content")
    (run_dir / "lock").symlink_to("precious")
    with pytest.raises(StartError, match="cannot open the lock"):
        RunDir(run_dir).open()
    assert (run_dir / "precious").read_text() == "content"


def test_sockets_listen_are_private_and_are_unlinked_at_close(owned: RunDir) -> None:
    old_umask = os.umask(0)
    try:
        stream, tether = owned.stream(owned.path / "s"), owned.tether(owned.path / "s")
    finally:
        os.umask(old_umask)
    for path, kind in ((owned.path / "s", socket.SOCK_STREAM), (owned.path / "s.tether", socket.SOCK_SEQPACKET)):
        assert path.lstat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX, kind) as peer:
            peer.connect(str(path))
    stream.close()
    tether.close()
    owned.close()
    assert sorted(path.name for path in owned.path.iterdir()) == ["lock", "s.lock"]


def test_what_a_killed_server_left_is_taken_over(run_dir: Path) -> None:
    path = run_dir / "s"
    end(hold(run_dir, path))
    assert path.is_socket()
    owned = RunDir(run_dir)
    owned.open()
    owned.stream(path).close()
    owned.tether(path).close()
    owned.close()
    assert not path.exists()


def test_a_path_in_use_by_a_server_of_another_run_dir_is_left_alone(run_dir: Path) -> None:
    path = run_dir / "s"
    (run_dir / "one").mkdir(mode=0o700)
    process = hold(run_dir / "one", path)
    owned = RunDir(run_dir / "two")
    try:
        owned.open()
        with pytest.raises(StartError, match=f"the socket {path} is in use by process {process.pid}"):
            owned.stream(path)
        with pytest.raises(StartError, match=f"in use by process {process.pid}"):
            owned.tether(path)
        owned.close()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(path))
        process.communicate("\n", timeout=10)  # it closes in order
        assert not path.exists()
    finally:
        owned.close()
        end(process)


def test_a_path_in_use_by_a_program_without_our_lock_is_left_alone(owned: RunDir) -> None:
    path = owned.path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(StartError, match="in use by another program"):
            owned.stream(path)
        assert path.is_socket()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("elsewhere")])
def test_a_path_that_is_no_socket_is_left_alone(owned: RunDir, make: object) -> None:
    path = owned.path / "s"
    assert callable(make)
    make(path)
    with pytest.raises(StartError, match="not a socket of ours"):
        owned.stream(path)
    path.lstat()


def test_only_the_socket_that_was_bound_is_unlinked(owned: RunDir) -> None:
    path = owned.path / "s"
    owned.stream(path).close()
    path.unlink()
    path.write_text("somebody else's")
    owned.close()
    assert path.read_text() == "somebody else's"


def test_a_path_that_does_not_fit_a_socket_is_refused(owned: RunDir) -> None:
    longest = UNIX_PATH_BYTES - len(str(owned.path)) - 1
    owned.stream(owned.path / ("s" * longest)).close()
    with pytest.raises(StartError, match="longer than 107 bytes"):
        owned.stream(owned.path / ("s" * (longest + 1)))


def child(owned: RunDir, pipe: "multiprocessing.connection.Connection") -> None:
    owned.close()  # as an `async with` that the fork copied would do
    pipe.send("forked")
    pipe.recv()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_neither_lock_nor_socket_and_takes_nothing_away(run_dir: Path) -> None:
    owned = RunDir(run_dir)
    owned.open()
    path = run_dir / "s"
    stream, tether = owned.stream(path), owned.tether(path)
    given_away = stream.detach()  # as it is to libzmq
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(owned, theirs))
    process.start()
    try:
        assert ours.recv() == "forked"
        assert path.is_socket()
        with pytest.raises(StartError, match="in use"):
            RunDir(run_dir).open()
        os.close(given_away)
        tether.close()
        with socket.socket(socket.AF_UNIX) as peer, pytest.raises(ConnectionRefusedError):
            peer.connect(str(path))
        # As if this process had been killed: its locks end without a word.
        for lock in owned._locks.values():
            os.close(lock._fd)
            lock._fd = -1
        successor = RunDir(run_dir)
        successor.open()
        successor.close()
    finally:
        ours.send("end")
        process.join()
        process.close()
        ours.close()
        theirs.close()
        owned.close()


def test_where_others_are_let_in_they_reach_the_sockets_and_nothing_else(run_dir: Path) -> None:
    before = os.umask(0o077)
    try:
        shared = RunDir(run_dir, shared=True)
        shared.open()
        stream, tether = shared.stream(run_dir / "router.sock"), shared.tether(run_dir / "router.sock")
    finally:
        os.umask(before)
    assert run_dir.stat().st_mode & 0o777 == 0o711
    assert {path.name: path.lstat().st_mode & 0o777 for path in run_dir.iterdir()} == {
        "lock": 0o600,
        "router.sock": 0o666,
        "router.sock.lock": 0o600,
        "router.sock.tether": 0o666,
    }
    stream.close()
    tether.close()
    shared.close()
    private = RunDir(run_dir)
    private.open()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    private.close()


def test_a_shared_directory_that_holds_other_things_is_not_opened_further(run_dir: Path) -> None:
    (run_dir / "mine").touch()
    run_dir.chmod(0o755)
    with pytest.raises(StartError, match="chmod 711 it"):
        RunDir(run_dir, shared=True).open()


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 16), reason="a kernel that lets descriptors in everywhere"
)
def test_nobody_sends_descriptors_where_nobody_takes_them(owned: RunDir) -> None:
    path = owned.path / "s"
    with owned.stream(path), owned.tether(path), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        with pytest.raises(PermissionError):
            socket.send_fds(peer, [b"x"], [0])
        peer.send(b"x")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
            worker.connect(f"{path}.tether")
            socket.send_fds(worker, [b"x"], [0])
