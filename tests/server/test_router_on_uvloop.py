"""The door's scenarios once more on uvloop, which looks at descriptors in its own order."""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.server import test_router, test_router_replies

Scenario = Callable[[], Coroutine[Any, Any, None]]

uvloop.new_event_loop().close()  # what libuv opens once per process is not a test's leak

WITHOUT_ARGUMENTS: list[Scenario] = [
    scenario
    for name, scenario in (vars(test_router) | vars(test_router_replies)).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(scenario) and not inspect.signature(scenario).parameters
]


@pytest.mark.parametrize("scenario", WITHOUT_ARGUMENTS, ids=lambda scenario: scenario.__name__.removeprefix("test_"))
def test_on_uvloop(scenario: Scenario) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
