"""What every test gets: guards against leaks and blocking calls, and the one way to wait.

Guards, on by themselves: file descriptors, threads, child processes, /dev/shm entries, memfd mappings and tasks are the
same after a test as before; a blocking call of lmlive's code on an event loop fails; an exception that reaches the
loop's handler fails; warnings are errors (pyproject.toml); after 20 s all stacks are printed and the test fails.
"""

import asyncio
import inspect
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, overload

import hypothesis
import pytest
import zmq
from blockbuster import BlockBuster

from tests import guards

T = TypeVar("T")

# Examples are made by the machine's leave: a deadline per example would be a timing assertion.
hypothesis.settings.register_profile("lmlive", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("lmlive"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "lmlive")

zmq.Frame(b"x", copy=False)  # pyzmq's thread that follows large messages is one per process, and no test's leak

# /proc answers from memory: doubles read it, and a server counts its descriptors there.
_blockbuster = BlockBuster("lmlive", excluded_modules=["lmlive.testing"])
_blockbuster.functions["os.stat"].can_block_in("lmlive/device/limits.py", "descriptors_in_use")
_blockbuster.functions["os.scandir"].can_block_in("lmlive/device/limits.py", "descriptors_in_use")
_blockbuster.functions["os.listdir"].can_block_in("lmlive/device/limits.py", "descriptors_in_use")


@overload
async def eventually(condition: Callable[[], Awaitable[T]], within: float = ...) -> T: ...


@overload
async def eventually(condition: Callable[[], T], within: float = ...) -> T: ...


async def eventually(condition: Callable[[], object], within: float = 5.0) -> object:
    """Wait until a condition holds and give what it returned; the only polling that tests do.

    Args:
        condition: A function, or a coroutine function, that returns something true once the condition holds.
        within: Seconds of patience, generous on purpose: it is a safeguard, not a measurement.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while True:
        outcome = condition()
        result: object = await outcome if inspect.isawaitable(outcome) else outcome
        if result:
            return result
        if loop.time() >= end:
            pytest.fail(f"did not hold within {within} s: {guards.describe(condition)}, last {result!r}")
        await asyncio.sleep(0.002)


@pytest.fixture(scope="session", autouse=True)
def _own_environment() -> Iterator[None]:
    """Keep settings of the shell that runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("LMLIVE_"):
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare what the process holds before and after; set up first, torn down last."""
    before = guards.held()
    yield
    stuck_release = request.node.get_closest_marker("stuck_release") is not None
    found = guards.leaks(before, stuck_release=stuck_release)
    if found:
        pytest.fail("the test leaked:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _loop_is_clean(request: pytest.FixtureRequest, _nothing_leaks: None) -> None:
    """Watch the loop of an asynchronous test; an ordinary one gets no loop."""
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("_loop_guard")


@pytest.fixture
async def _loop_guard(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    unhandled: list[str] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        unhandled.append(f"{context.get('message')}: {context.get('exception')!r}")
        loop.default_exception_handler(context)

    loop.set_exception_handler(note)
    before = asyncio.all_tasks()
    yield
    found = await guards.leaked_tasks(before)
    if request.node.get_closest_marker("loop_errors") is None:
        found += [f"unhandled on the loop: {text}" for text in unhandled]
    if found:
        pytest.fail("the test left on its loop:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def _nothing_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a blocking call of lmlive's code fail where an event loop runs."""
    if request.node.get_closest_marker("may_block") is not None:
        yield
        return
    _blockbuster.activate()
    yield
    _blockbuster.deactivate()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Give an empty private directory with a short path: a unix socket's has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="lm-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
