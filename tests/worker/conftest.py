"""A fake server for every test here that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.fake_server import FakeServer


@pytest.fixture
def server(run_dir: Path) -> Iterator[FakeServer]:
    """Give a server that serves."""
    with FakeServer(run_dir) as fake:
        yield fake
