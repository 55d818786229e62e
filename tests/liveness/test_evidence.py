"""What the kernel told, in words for a log."""

import pytest

from lmlive.liveness.evidence import Evidence, Exit


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit(pid=7, status=None, signal=9), "process 7 was killed by SIGKILL"),
        (Exit(pid=7, status=None, signal=35), "process 7 was killed by signal 35"),
        (Exit(pid=7, status=0, signal=None), "process 7 exited with status 0"),
        (Exit(pid=7, status=3, signal=None), "process 7 exited with status 3"),
        (Exit(pid=7, status=None, signal=None), "process 7 exited"),
        (Exit(pid=None, status=None, signal=None), "process exited"),
    ],
)
def test_an_exit_says_what_is_known(end: Exit, text: str) -> None:
    assert str(end) == text


def test_evidence_is_named_as_in_the_status() -> None:
    assert [str(evidence) for evidence in Evidence] == ["process", "none"]
