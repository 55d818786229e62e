import pytest

from lmlive.worker.ways import Way, ways_of


@pytest.mark.parametrize(
    ("mode", "strategy", "mirrored", "ways"),
    [
        ("server_driven", "auto", False, "server_driven"),
        ("server_driven", "inline", True, "server_driven"),
        ("engine_driven", "auto", False, "shm inline"),
        ("engine_driven", "shm", True, "shm"),
        ("engine_driven", "inline", False, "inline"),
        ("auto", "auto", False, "server_driven shm inline"),
        ("auto", "auto", True, "shm server_driven inline"),
        ("auto", "shm", True, "shm server_driven"),
        ("auto", "shm", False, "server_driven shm"),
        ("auto", "inline", True, "server_driven inline"),
    ],
)
def test_what_is_tried_and_in_which_order(mode: str, strategy: str, mirrored: bool, ways: str) -> None:
    assert [way.value for way in ways_of(mode, strategy, mirrored=mirrored)] == ways.split()


def test_two_of_them_are_copies_of_the_workers_own() -> None:
    assert [way for way in Way if way.copies_itself] == [Way.SHM, Way.INLINE]
