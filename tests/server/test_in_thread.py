"""Calls in a thread of their own, which nobody waits for at the end."""

import asyncio
import subprocess
import sys
import threading

import pytest

from lmlive.server.lanes import in_thread
from lmlive.testing import Gate
from tests.conftest import eventually


async def test_in_thread_gives_the_result_or_the_error() -> None:
    assert await in_thread(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


HANGS_WHILE_IT_ENDS = """
import asyncio, threading
from lmlive.server.lanes import in_thread

async def main():
    hung = threading.Event()
    task = asyncio.ensure_future(in_thread(lambda: (hung.set(), threading.Event().wait())))
    while not hung.is_set():
        await asyncio.sleep(0)
    task.cancel()

asyncio.run(main())
print("over")
"""


def test_a_call_in_a_thread_does_not_hold_up_the_interpreters_exit() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS_WHILE_IT_ENDS], check=True, capture_output=True, timeout=15)
    assert (done.stdout, done.stderr) == (b"over\n", b"")


def test_a_call_in_a_thread_may_outlive_its_loop() -> None:
    gate = Gate()
    threads: list[threading.Thread] = []

    def hang() -> None:
        threads.append(threading.current_thread())
        gate.pass_through()

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(hang))
        await eventually(lambda: gate.waiting == 1)
        task.cancel()

    asyncio.run(main())
    gate.open()
    threads[0].join()
