import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lmlive.clock import MonotonicClock
from lmlive.errors import StartError
from lmlive.testing.clock import ManualClock
from lmlive.tier.base import HEAD_BYTES, MARK_BYTES, model_mark
from lmlive.tier.filesystem import FilesystemTier
from tests.tier.chunks import SIZE, chunk, empty, name

FAR = float("inf")
FILE = SIZE + HEAD_BYTES


def opened(directory: Path, most_bytes: int = 10 * FILE, clock: ManualClock | None = None) -> FilesystemTier:
    tier = FilesystemTier(directory, most_bytes, clock or ManualClock())
    tier.open()
    return tier


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "lock")


def test_what_was_saved_is_found_and_loaded_whole(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    assert tier.find([name(1)], FAR) == 0
    assert tier.save(name(1), chunk(1), FAR)
    assert tier.save(name(1), chunk(1), FAR)  # it is there: nothing is written
    assert tier.find([name(1), name(2)], FAR) == 1
    into = empty()
    assert tier.load(name(1), into, FAR)
    assert (into == chunk(1)).all()
    assert not tier.load(name(2), into, FAR)
    assert (tier.counts.saved, tier.counts.loaded, tier.counts.missed, tier.used_bytes) == (1, 1, 1, FILE)
    tier.close()


def test_it_is_there_after_a_restart_with_the_order_of_use(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    for seed in range(3):
        assert tier.save(name(seed), chunk(seed), FAR)
    assert tier.load(name(0), empty(), FAR)
    tier.close()
    again = opened(tmp_path / "kv", 3 * FILE)
    assert again.used_bytes == 3 * FILE
    assert again.save(name(3), chunk(3), FAR)
    assert [again.find([name(seed)], FAR) for seed in range(4)] == [1, 0, 1, 1]
    assert len(files(tmp_path)) == 3
    again.close()


def test_it_never_holds_more_than_it_may(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv", 2 * FILE)
    for seed in range(5):
        assert tier.save(name(seed), chunk(seed), FAR)
        assert len(files(tmp_path)) <= 2
    assert (tier.counts.evicted, tier.used_bytes) == (3, 2 * FILE)
    assert not tier.save(name(9), chunk(9, 3 * SIZE), FAR)
    assert tier.counts.refused == 1
    tier.close()
    smaller = opened(tmp_path / "kv", FILE)
    assert len(files(tmp_path)) == 1
    smaller.close()


@pytest.mark.parametrize("bit", [0, 7, 8 * HEAD_BYTES - 100, 8 * HEAD_BYTES, 8 * (FILE - 1) + 3])
def test_a_flipped_bit_is_a_miss_and_the_file_goes(tmp_path: Path, bit: int) -> None:
    tier = opened(tmp_path / "kv")
    assert tier.save(name(1), chunk(1), FAR)
    [path] = files(tmp_path)
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    assert not tier.load(name(1), empty(), FAR)
    assert (tier.counts.corrupt, tier.used_bytes, files(tmp_path)) == (1, 0, [])
    assert tier.save(name(1), chunk(1), FAR)
    tier.close()


@pytest.mark.parametrize("length", [0, 10, HEAD_BYTES, FILE - 1, FILE + 1])
def test_a_file_of_another_length_is_a_miss(tmp_path: Path, length: int) -> None:
    tier = opened(tmp_path / "kv")
    assert tier.save(name(1), chunk(1), FAR)
    os.truncate(files(tmp_path)[0], length)
    assert not tier.load(name(1), empty(), FAR)
    assert files(tmp_path) == []
    tier.close()


def test_a_file_that_somebody_deleted_or_put_under_another_name_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    assert tier.save(name(1), chunk(1), FAR)
    assert tier.save(name(2), chunk(2), FAR)
    for path in files(tmp_path):
        if path.name == name(1).hex():
            one = path
        else:
            two = path
    one.replace(two)
    assert not tier.load(name(1), empty(), FAR)
    assert not tier.load(name(2), empty(), FAR)
    assert tier.find([name(1)], FAR) == tier.find([name(2)], FAR) == tier.used_bytes == 0
    tier.close()


def test_past_its_deadline_nothing_is_loaded_or_saved(tmp_path: Path) -> None:
    clock = ManualClock(10.0)
    tier = opened(tmp_path / "kv", clock=clock)
    assert not tier.save(name(1), chunk(1), 9.0)
    assert files(tmp_path) == []
    assert tier.save(name(1), chunk(1), 10.0)
    assert not tier.load(name(1), empty(), 9.0)
    assert tier.find([name(1)], FAR) == 1
    tier.close()


def test_a_full_disk_refuses_and_makes_room_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path / "kv")
    assert tier.save(name(1), chunk(1), FAR)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        assert not tier.save(name(2), chunk(2), FAR)
    assert (tier.counts.failures, tier.counts.refused, tier.counts.evicted, tier.used_bytes) == (1, 1, 1, 0)
    assert files(tmp_path) == []
    assert tier.save(name(2), chunk(2), FAR)
    tier.close()


def test_a_clear_deletes_one_models_chunks_or_all(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    mine, yours = (model_mark(model) + name(1)[MARK_BYTES:] for model in "mn")
    for one in (mine, yours):
        assert tier.save(one, chunk(1), FAR)
    assert tier.clear(model_mark("m"), FAR)
    assert (tier.find([mine], FAR), tier.find([yours], FAR), tier.used_bytes) == (0, 1, FILE)
    assert len(files(tmp_path)) == 1
    assert tier.save(mine, chunk(2), FAR)
    assert tier.clear(None, FAR)
    assert (tier.used_bytes, files(tmp_path)) == (0, [])
    tier.close()
    assert not tier.clear(None, FAR)


def test_a_file_that_cannot_be_deleted_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path / "kv")
    assert tier.save(name(1), chunk(1), FAR)

    def broken(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        assert not tier.clear(None, FAR)
    assert tier.failing == "Input/output error"
    assert tier.clear(None, FAR)
    assert (tier.used_bytes, files(tmp_path)) == (0, [])
    assert tier.save(name(1), chunk(1), FAR)
    assert tier.failing is None
    tier.close()


def test_a_directory_is_one_servers_alone_and_private(tmp_path: Path) -> None:
    tier = opened(tmp_path / "kv")
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    with pytest.raises(StartError, match=f"process {os.getpid()}"):
        opened(tmp_path / "kv")
    tier.close()
    tier.close()
    opened(tmp_path / "kv").close()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    with pytest.raises(StartError, match="no link"):
        opened(tmp_path / "link")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartError, match="cannot be used"):
        opened(tmp_path / "file")
    with pytest.raises(StartError, match="cannot be used"):
        opened(tmp_path / "nowhere" / "kv")


def test_what_is_not_ours_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    opened(tmp_path / "kv").close()
    (tmp_path / "kv" / "notes").write_text("mine")
    (tmp_path / "kv" / "ab").mkdir()
    (tmp_path / "kv" / "ab" / "notes").write_text("mine")
    tier = opened(tmp_path / "kv", FILE)
    assert tier.used_bytes == 0
    assert tier.save(name(1), chunk(1), FAR)
    assert (tmp_path / "kv" / "ab" / "notes").exists()
    tier.close()


ENDLESS = """
import sys
from pathlib import Path
from itertools import count
from lmlive.clock import MonotonicClock
from lmlive.tier.filesystem import FilesystemTier
from tests.tier.chunks import chunk, name
tier = FilesystemTier(Path(sys.argv[1]), 20 << 20, MonotonicClock())
tier.open()
print("open", flush=True)
for seed in count():
    tier.save(name(seed % 50), chunk(seed % 50), float("inf"))
    if seed % 3 == 0:
        print(seed, flush=True)
"""


@pytest.mark.timeout(60)
def test_whatever_instant_it_is_killed_at_what_is_there_is_whole(tmp_path: Path) -> None:
    """Killed again and again while it writes and makes room."""
    root = str(Path(__file__).parents[2])
    for kill in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path / "kv")],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        ) as process:
            assert process.stdout is not None
            for _ in range(2 + kill % 4):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        tier = FilesystemTier(tmp_path / "kv", 20 << 20, MonotonicClock())
        tier.open()
        assert not list((tmp_path / "kv" / "unfinished").iterdir())
        held = [seed for seed in range(50) if tier.find([name(seed)], FAR)]
        assert held
        for seed in held:
            into = empty()
            assert tier.load(name(seed), into, FAR)
            assert (into == chunk(seed)).all()
        assert tier.counts.corrupt == tier.counts.failures == 0
        assert tier.used_bytes == len(held) * FILE <= 20 << 20
        tier.close()
