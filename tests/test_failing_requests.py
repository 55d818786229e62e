"""Some of each kind; ``python -m tests.failing_requests`` sends ten thousand."""

from pathlib import Path

import pytest

from tests.failing_requests import run_all


@pytest.mark.may_block
async def test_every_failing_request_gets_its_error_and_leaves_nothing(run_dir: Path) -> None:
    found = await run_all(run_dir, 500)
    assert len(found) > 40
    assert [kind for kind in found if not kind["ok"]] == []
