import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lmlive.errors import NotOwner
from lmlive.worker import heartbeat
from lmlive.worker.diagnosis import refused_by_files
from tests.worker.workers import fast, make

NOBODY = 65534


def test_what_is_not_there_refuses_nobody(run_dir: Path) -> None:
    assert refused_by_files(f"ipc://{run_dir}/router.sock") is None
    assert refused_by_files("tcp://127.0.0.1:1") is None


def test_our_own_socket_lets_us_in(run_dir: Path) -> None:
    (run_dir / "router.sock").touch(0o600)
    assert refused_by_files(f"ipc://{run_dir}/router.sock") is None


def _as_nobody(url: str, told: Connection) -> None:
    os.setresuid(NOBODY, NOBODY, NOBODY)
    error = refused_by_files(url)
    told.send(None if error is None else error.fields)
    os._exit(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_another_user_is_told(run_dir: Path, mode: int) -> None:
    run_dir.chmod(mode)
    (run_dir / "router.sock").touch(0o600)
    ours, theirs = multiprocessing.Pipe()
    url = f"ipc://{run_dir}/router.sock"
    child = multiprocessing.get_context("fork").Process(target=_as_nobody, args=(url, theirs))
    child.start()
    assert ours.poll(10)
    assert ours.recv() == {"uid": NOBODY, "owner": os.geteuid()}
    child.join()
    child.close()
    ours.close()
    theirs.close()


async def test_it_raises_at_entry(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "refused_by_files", lambda url: NotOwner("not you", uid=7))
    with pytest.raises(NotOwner):
        async with make(f"ipc://{run_dir}/router.sock", config=fast(request_timeout=0.05)):
            pytest.fail("it entered")
