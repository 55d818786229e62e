import os
from pathlib import Path

import pytest

from lmlive.device.pool import PoolMemory
from lmlive.errors import StartError

MIB = 1 << 20


def test_what_is_written_is_there_for_the_next_one_of_the_same_size(tmp_path: Path) -> None:
    first = PoolMemory(MIB, path=tmp_path / "pool")
    assert not first.kept
    assert first.populate()
    first.view[-3:] = 7
    first.close()
    assert (tmp_path / "pool").stat().st_mode & 0o777 == 0o600
    second = PoolMemory(MIB, path=tmp_path / "pool")
    assert second.kept
    assert second.populate()
    assert second.view[-4:].tolist() == [0, 7, 7, 7]
    second.close()
    larger = PoolMemory(2 * MIB, path=tmp_path / "pool")
    assert not larger.kept
    assert not larger.view.any()
    larger.close()


def test_it_is_one_servers_at_a_time(tmp_path: Path) -> None:
    first = PoolMemory(MIB, path=tmp_path / "pool")
    with pytest.raises(StartError, match="another server's"):
        PoolMemory(MIB, path=tmp_path / "pool")
    first.close()
    PoolMemory(MIB, path=tmp_path / "pool").close()


def test_only_a_file_of_ours_is_used_and_none_is_changed_before_that_is_known(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(precious)
    os.link(precious, tmp_path / "second")
    for path in (tmp_path / "link", tmp_path / "second", tmp_path, tmp_path / "no" / "pool", Path("/dev/zero")):
        with pytest.raises(StartError, match="pool_file"):
            PoolMemory(MIB, path=path)
    assert precious.read_bytes() == b"precious"


def test_a_file_over_four_fifths_of_the_memory_is_refused_and_what_a_kept_one_has_counts(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="80 %"):
        PoolMemory(MIB, path=tmp_path / "pool", available=MIB)
    first = PoolMemory(MIB, path=tmp_path / "pool", available=2 * MIB)
    assert first.populate()
    first.close()
    PoolMemory(MIB, path=tmp_path / "pool", available=MIB // 2).close()
