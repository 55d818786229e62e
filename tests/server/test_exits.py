"""How processes ended, as the kernel tells it to others than their parent: on real ones."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lmlive.server import exits
from lmlive.server.exits import WatchedProcess, has_exited, start_time

NOBODY = 2**22 - 1
DIE = "import os, sys; sys.stdin.read(); os._exit(7)"
BE_KILLED = "import os, signal, sys; sys.stdin.read(); os.kill(os.getpid(), {})"

pytestmark = pytest.mark.may_block  # waits for children


class Counter:
    """A cgroup's count of OOM kills."""

    def __init__(self, *counts: int | None) -> None:
        self._counts = list(counts)
        self.asked: list[int] = []

    def find(self, pid: int) -> "Counter":
        self.asked.append(pid)
        return self

    def __call__(self) -> int | None:
        return self._counts.pop(0) if self._counts else None


class Child:
    """A process that ends when it is told to."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdin=subprocess.PIPE)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.watched: list[WatchedProcess] = []

    def watch(self, counter: Counter | None = None, *, pid: int | None = 0, uid: int | None = None) -> WatchedProcess:
        watched = WatchedProcess(
            os.dup(self.pidfd),
            self.process.pid if pid == 0 else pid,
            os.geteuid() if uid is None else uid,
            (counter or Counter()).find,
        )
        self.watched.append(watched)
        return watched

    def end(self, *, waited: bool = False) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        select.select([self.pidfd], [], [])
        if waited:
            self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.pidfd)
        for watched in self.watched:
            watched.close()
            watched.close()


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    made = Child(getattr(request, "param", DIE))
    yield made
    made.close()


def kernel_tells_after_wait() -> bool:
    """Tell whether this kernel remembers how a process ended once its parent has asked."""
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", ""]) as process:
        pidfd = os.pidfd_open(process.pid)
    watched = WatchedProcess(pidfd, None, None, Counter().find)
    told = watched.read_exit().status is not None
    watched.close()
    return told


@pytest.mark.parametrize("waited", [False, True], ids=["zombie", "waited for"])
@pytest.mark.parametrize(
    ("child", "end"),
    [
        (DIE, (7, None)),
        ("import sys; sys.stdin.read()", (0, None)),
        (BE_KILLED.format(9), (None, signal.SIGKILL)),
        (BE_KILLED.format(15), (None, signal.SIGTERM)),
        (BE_KILLED.format(40), (None, 40)),
    ],
    ids=["status 7", "status 0", "SIGKILL", "SIGTERM", "real-time signal"],
    indirect=["child"],
)
def test_the_kernel_tells_how_a_process_ended(child: Child, end: tuple[int | None, int | None], waited: bool) -> None:
    if waited and not kernel_tells_after_wait():
        pytest.skip("this kernel forgets how a process ended when its parent has asked")
    watched = child.watch()
    assert not watched.exited
    child.end(waited=waited)
    assert watched.exited
    assert watched.read_exit()[:2] == end


def test_without_a_pid_a_zombie_tells_nothing_yet(child: Child) -> None:
    watched = child.watch(pid=None)
    child.end()
    if watched.read_exit()[:2] == (None, None):
        assert watched.read_exit().oom_killed is None
    child.process.wait()
    assert watched.read_exit()[:2] in ((7, None), (None, None))


def test_a_pid_that_another_process_has_by_now_tells_nothing(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = child.watch()
    child.end()
    monkeypatch.setattr(exits, "_read_info", lambda pidfd: None)
    assert watched.read_exit().status == 7
    assert watched._started is not None
    watched._started += 1  # the zombie with this number was started at another time
    assert watched.read_exit() == (None, None, None)


def test_a_process_that_was_gone_already_is_not_looked_up_by_number(child: Child) -> None:
    child.end(waited=True)
    counter = Counter(1, 2)
    watched = child.watch(counter, pid=os.getpid())  # the number is another's now, and that one lives
    assert watched._started is None
    assert watched.read_exit().oom_killed in (False, None)
    assert counter._counts == [1, 2]


def test_the_status_of_another_users_process_is_not_believed(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_read_info", lambda pidfd: None)
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    watched = child.watch(uid=54_321)
    # To a stranger the kernel shows a status of 0, whatever it was.
    shown = [b"Z", *[b"0"] * 60]
    shown[exits._START_TIME_FIELD] = str(watched._started).encode()
    monkeypatch.setattr(exits, "read_stat", lambda pid: shown)
    child.end()
    assert watched.read_exit()[:2] == (None, None)


@pytest.mark.parametrize(
    ("child", "before", "after", "expected"),
    [
        (BE_KILLED.format(9), 3, 4, True),
        (BE_KILLED.format(9), 3, 3, False),
        (BE_KILLED.format(9), None, 4, None),
        (BE_KILLED.format(9), 3, None, None),
        (BE_KILLED.format(15), 3, 4, False),
        (DIE, 3, 4, False),
    ],
    indirect=["child"],
)
def test_an_oom_kill_is_a_sigkill_and_a_count_that_grew(
    child: Child, before: int | None, after: int | None, expected: bool | None
) -> None:
    counter = Counter(before, after)
    watched = child.watch(counter)
    assert counter.asked == [child.process.pid]
    child.end()
    assert watched.read_exit().oom_killed is expected


@pytest.mark.parametrize(("after", "expected"), [(3, False), (4, None)])
def test_where_the_signal_is_not_known_only_a_count_that_stood_still_says_something(
    child: Child, monkeypatch: pytest.MonkeyPatch, after: int, expected: bool | None
) -> None:
    watched = child.watch(Counter(3, after))
    child.end()
    monkeypatch.setattr(exits, "_read_info", lambda pidfd: None)
    monkeypatch.setattr(exits, "read_stat", lambda pid: [])
    assert watched.read_exit() == (None, None, expected)


def test_who_has_a_number_is_told_by_its_start() -> None:
    assert start_time(NOBODY) is None
    mine = start_time(os.getpid())
    assert mine is not None
    assert start_time(os.getpid()) == mine
    pidfd = os.pidfd_open(os.getpid())
    assert not has_exited(pidfd)
    os.close(pidfd)
