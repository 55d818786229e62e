import asyncio
import os
import subprocess
import sys

from lmlive.worker.unsettled import Unsettled
from tests.conftest import eventually


def start() -> tuple["subprocess.Popen[bytes]", int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    return process, os.pidfd_open(process.pid)


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


async def test_blocks_are_unsettled_until_the_terminal_answer() -> None:
    unsettled = Unsettled()
    first, second = unsettled.begin(7, [1, 2]), unsettled.begin(7, [2, 3])
    assert unsettled.blocks == {1, 2, 3}
    unsettled.settle(first)
    assert first.settled.done()
    assert unsettled.blocks == {2, 3}
    unsettled.settle(second)
    unsettled.settle(second)
    assert unsettled.blocks == frozenset()


async def test_the_exit_of_its_server_settles() -> None:
    unsettled = Unsettled()
    exits: list[int] = []
    unsettled.on_exit = exits.append
    process, pidfd = start()
    try:
        unsettled.watch(7, pidfd)
        doubt, other = unsettled.begin(7, [1]), unsettled.begin(8, [2])
    finally:
        end(process)
    await doubt.settled
    assert exits == [7]
    assert not other.settled.done()
    assert unsettled.blocks == {2}
    unsettled.settle_all(8)
    unsettled.close()


async def test_closing_settles_nothing_and_the_exit_is_still_seen() -> None:
    unsettled = Unsettled()
    process, pidfd = start()
    try:
        unsettled.watch(7, pidfd)
        doubt = unsettled.begin(7, [(0, 1)])
        unsettled.close()
        assert unsettled.blocks == {(0, 1)}
    finally:
        end(process)
    await eventually(doubt.settled.done)
    assert len(unsettled) == 0


async def test_a_server_is_watched_for_as_long_as_something_is_unsettled() -> None:
    unsettled = Unsettled()
    (first, first_fd), (second, second_fd) = start(), start()
    try:
        unsettled.watch(7, first_fd)
        doubt = unsettled.begin(7, [1])
        unsettled.watch(8, second_fd)
        assert set(unsettled._processes) == {7, 8}
        unsettled.settle(doubt)
        assert set(unsettled._processes) == {8}
        unsettled.close()
        assert not unsettled._processes
    finally:
        end(first)
        end(second)


def test_a_loop_that_ends_leaves_no_descriptor() -> None:
    process, pidfd = start()

    async def doubt_and_leave() -> Unsettled:
        unsettled = Unsettled()
        unsettled.watch(7, pidfd)
        unsettled.begin(7, [1])
        unsettled.close()
        return unsettled

    try:
        assert asyncio.run(doubt_and_leave()).blocks == {1}
    finally:
        end(process)
