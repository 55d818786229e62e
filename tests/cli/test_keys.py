"""The command with keys, against real servers: what it takes, and how it says why it is refused."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lmlive.cli.command import OK, REFUSED, USAGE, main
from lmlive.config import ServerConfig
from lmlive.server.lanes import in_thread
from lmlive.server.server import LivenessServer
from tests.keys import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
async def server(run_dir: Path, keys: Keys) -> AsyncIterator[LivenessServer]:
    config = ServerConfig(
        run_dir=run_dir, pool_bytes="1MiB", bind="tcp://127.0.0.1:0", environ={}, **keys.at_the_server
    )
    async with LivenessServer(config) as serving:
        yield serving


def flags(settings: dict[str, Any]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


async def test_every_command_works_with_keys(
    server: LivenessServer, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--url", server.url, *flags(keys.of("friend"))]
    assert await in_thread(lambda: main(["ping", *given])) == OK
    assert capsys.readouterr().out.startswith("pong ")
    assert await in_thread(lambda: main([*given, "status", "--json"])) == OK
    assert json.loads(capsys.readouterr().out)["server"]["state"] == "serving"
    assert await in_thread(lambda: main(["clear", *given])) == OK
    assert await in_thread(lambda: main(["reap", "5", *given])) == REFUSED  # nobody has this number
    assert "no instance 5" in capsys.readouterr().err


async def test_variables_hold_keys_as_well(
    server: LivenessServer, keys: Keys, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "LMLIVE_CURVE_SECRET_KEY", str(keys.secret("friend")))
    monkeypatch.setitem(os.environ, "LMLIVE_CURVE_SERVER_KEY", str(keys.public("server")))
    assert await in_thread(lambda: main(["ping", "--url", server.url])) == OK
    assert await in_thread(lambda: main(["ping", "--url", server.url, *flags(keys.of("stranger"))])) == REFUSED
    assert "not among those it knows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("none", "lets in only those with keys: give its public key (curve_server_key)"),
        ("another server's", "its key is not the one given"),
        ("a stranger's", "our key is not among those it knows"),
    ],
)
async def test_a_refusal_is_one_line_that_says_what_to_do(
    server: LivenessServer, keys: Keys, given: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {
        "none": {},
        "another server's": keys.of("friend", server="stranger"),
        "a stranger's": keys.of("stranger"),
    }[given]
    assert await in_thread(lambda: main(["ping", "--url", server.url, "--timeout", "60", *flags(settings)])) == REFUSED
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith(f"lmlive: refused by {server.url}: ")
    assert text in printed.err
    assert printed.err.count("\n") == 1


def test_a_key_that_is_none_is_wrong_usage(keys: Keys, capsys: pytest.CaptureFixture[str]) -> None:
    url = "tcp://127.0.0.1:1"
    assert main(["ping", "--url", url, "--curve-server-key", "/nowhere"]) == USAGE
    assert "curve_server_key is '/nowhere' but must be" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["ping", "--url", url, "--curve-secret-key", str(keys.secret("friend"))])
    assert left.value.code == USAGE
    assert "curve_server_key" in capsys.readouterr().err
