import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmlive._version import __version__
from lmlive.cli import main
from lmlive.config import ServerConfig
from lmlive.errors import RequestTimeout, ServerDraining, VersionError
from lmlive.protocol.codec import Header, encode_reply
from lmlive.protocol.verbs import Verb
from lmlive.server.rundir import Lock
from lmlive.server.server import LivenessServer
from tests.cli.fake_router import EPOCH, HEALTHY, answering, fake_router, refusing, with_changes

Output = pytest.CaptureFixture[str]


def usage_error(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


async def test_every_command_answers_for_a_real_server(run_dir: Path, capsys: Output) -> None:
    config = ServerConfig(run_dir=run_dir, pool_bytes="1MiB")
    async with LivenessServer(config) as server:

        async def run(*arguments: str) -> tuple[int, str, str]:
            status = await asyncio.to_thread(main, [*arguments, "--url", server.url])
            return status, *capsys.readouterr()

        epoch = server.status().to_dict()["server"]["epoch"]  # type: ignore[index]
        status, out, err = await run("ping")
        assert (status, err) == (0, "")
        assert re.fullmatch(rf"pong \d+\.\d+ ms epoch={epoch}\n", out)

        status, out, err = await run("status")
        assert (status, err) == (0, "")
        assert out.startswith(f"lmlive {__version__}   serving, pid {os.getpid()}, epoch {epoch}")

        status, out, err = await run("status", "--json")
        assert (status, err) == (0, "")
        told, now = json.loads(out), server.status().to_dict()
        assert list(told) == list(now)
        assert {name: list(told[name]) for name in told} == {name: list(now[name]) for name in now}  # type: ignore[call-overload]

        status, out, err = await run("reap", "12345")
        assert (status, out) == (1, "")
        assert err == "lmlive: no instance 12345 is registered: see lmlive status\n"

        assert await run("clear") == (0, "cleared 0 chunks\n", "")
        assert await run("clear", "--model", "m", "--json") == (0, '{"chunks": 0}\n', "")
        assert server.status().wire.errors == {}


def test_the_epoch_has_16_digits_like_the_ready_line(run_dir: Path, capsys: Output) -> None:
    with fake_router(run_dir, answering()) as url:
        assert main(["ping", "--url", url]) == 0
    assert re.fullmatch(r"pong \d+\.\d\d ms epoch=00000000000000ab\n", capsys.readouterr().out)


def test_json_of_each_command_is_one_document(run_dir: Path, capsys: Output) -> None:
    with fake_router(run_dir, answering()) as url:
        for command in (["ping"], ["status"], ["reap", "5"], ["clear"]):
            assert main(["--json", *command, "--url", url]) == 0
        ping, status, reap, clear = map(json.loads, capsys.readouterr().out.splitlines())
    assert ping == {"ping_ms": ping["ping_ms"], "epoch": f"{EPOCH:016x}"}
    assert status == HEALTHY
    assert reap == {"instance_id": "5", "reaped": True}
    assert clear == {"chunks": 8}


def test_reap_says_what_it_did(run_dir: Path, capsys: Output) -> None:
    with fake_router(run_dir, answering()) as url:
        assert main(["reap", "5", "--generation", "2", "--url", url]) == 0
    assert capsys.readouterr().out == "reaped 5\n"


@pytest.mark.parametrize(
    ("status", "complaint"),
    [
        (with_changes(server={"state": "draining"}), "the server is draining, not serving"),
        (with_changes(releases={"stuck": 2}), "2 releases are stuck"),
        (with_changes(liveness={"last_scan_age_seconds": 96.0}), "the last scan was 96.0 s ago"),
        ({}, "unknown state"),
    ],
)
@pytest.mark.parametrize("command", ["ping", "status"])
def test_a_server_that_is_not_well_is_status_4(
    command: str, status: dict[str, object], complaint: str, run_dir: Path, capsys: Output
) -> None:
    with fake_router(run_dir, answering(status)) as url:
        assert main([command, "--url", url]) == 4
    out, err = capsys.readouterr()
    assert out  # it answered nevertheless
    assert err.startswith("lmlive: ")
    assert complaint in err


def test_nobody_there(run_dir: Path, capsys: Output) -> None:
    url = f"ipc://{run_dir}/router.sock"
    assert main(["ping", "--url", url, "--timeout", "0.05"]) == 1
    assert capsys.readouterr() == (
        "",
        f"lmlive: no server at {url}: start one with: lmlive serve --run-dir {run_dir}\n",
    )


@pytest.mark.parametrize("url", ["ipc://{run_dir}/other.sock", "tcp://127.0.0.1:9"])
def test_nobody_at_an_address_of_ones_own(url: str, run_dir: Path, capsys: Output) -> None:
    url = url.format(run_dir=run_dir)
    assert main(["ping", "--url", url, "--timeout", "0.05"]) == 1
    assert capsys.readouterr().err == f"lmlive: no server at {url}: start one with: lmlive serve --bind {url}\n"


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a process, and return when it is stopped."""
    process.send_signal(signal.SIGSTOP)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT) is not None


def test_a_stopped_server_is_named(run_dir: Path, capsys: Output) -> None:
    command = [sys.executable, "-m", "lmlive.cli", "serve", "--run-dir", str(run_dir), "--pool-bytes", "1MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("lmlive ready")
            url = f"ipc://{run_dir}/router.sock"
            stop(process)
            assert main(["ping", "--url", url, "--timeout", "0.1"]) == 1
            assert capsys.readouterr().err == (
                f"lmlive: no answer from {url}: process {process.pid} holds this run dir and does not answer: "
                f"continue it (kill -CONT {process.pid}) or end it\n"
            )
        finally:
            process.kill()
    assert main(["ping", "--url", url, "--timeout", "0.05"]) == 1
    assert f"no server at {url}: start one with" in capsys.readouterr().err


def test_a_server_that_runs_and_takes_no_connection_is_named(run_dir: Path, capsys: Output) -> None:
    path = run_dir / "router.sock"
    lock = Lock(path.with_name("router.sock.lock"), "the socket")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert main(["ping", "--url", f"ipc://{path}", "--timeout", "0.05"]) == 1
    lock.close()
    hint = "its log says where it is bound, and what it does"
    expected = f"process {os.getpid()} holds this run dir and does not answer: {hint}\n"
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.parametrize("content", ["", "nonsense", "1\n", "4194305\n", "٣"])
def test_a_lock_that_nobody_holds_names_nobody(content: str, run_dir: Path, capsys: Output) -> None:
    (run_dir / "router.sock.lock").write_text(content)
    assert main(["ping", "--url", f"ipc://{run_dir}/router.sock", "--timeout", "0.05"]) == 1
    assert "start one with" in capsys.readouterr().err


def test_a_server_that_stops_before_it_answers_is_named(run_dir: Path, capsys: Output) -> None:
    url = f"ipc://{run_dir}/router.sock"
    hold = (
        "import sys; from pathlib import Path; from lmlive.server.rundir import Lock\n"
        "lock = Lock(Path(sys.argv[1]), 'it'); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, f"{run_dir}/router.sock.lock"]
    with (
        fake_router(run_dir, lambda _: None),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        stop(process)
        assert main(["ping", "--url", url, "--timeout", "0.2"]) == 1
        process.kill()
    assert capsys.readouterr().err == (
        f"lmlive: the server at {url} did not answer HELLO within 0.2 s: process {process.pid} is stopped: "
        f"continue it (kill -CONT {process.pid}) or end it\n"
    )


def test_a_socket_without_a_server_is_told_apart(run_dir: Path, capsys: Output) -> None:
    (run_dir / "router.sock").touch()
    assert main(["ping", "--url", f"ipc://{run_dir}/router.sock", "--timeout", "0.05"]) == 1
    assert f"{run_dir}/router.sock is no socket" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_told_apart(run_dir: Path, capsys: Output) -> None:
    with fake_router(run_dir, lambda _: None) as url:
        assert main(["status", "--url", url, "--timeout", "0.2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "did not answer HELLO within 0.2 s" in err
    assert "--timeout" in err


def wrong_replies(header: Header) -> bytes:
    return encode_reply(header.request_id, EPOCH, 0, 0, ["nonsense"])


def another_version(header: Header) -> bytes:
    return b"LML1\x02" + wrong_replies(header)[5:]


@pytest.mark.parametrize(
    ("respond", "complaint"),
    [
        (refusing(Verb.HELLO, VersionError("upgrade the older side")), "VersionError: upgrade the older side"),
        (refusing(Verb.CLEAR, ServerDraining("use another")), "ServerDraining: use another"),
        (refusing(Verb.CLEAR, RequestTimeout("too\x1b[31m late")), "too?[31m late"),
        (wrong_replies, "InvalidPayload: HELLO reply"),
        (another_version, "VersionError: the server speaks wire version 2"),
    ],
)
def test_a_refusal_is_told_in_one_line(respond: object, complaint: str, run_dir: Path, capsys: Output) -> None:
    assert callable(respond)
    with fake_router(run_dir, respond) as url:
        assert main(["clear", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert err.count("\n") == 1


def test_replies_to_others_and_noise_are_passed_over(run_dir: Path) -> None:
    usual = answering()

    def twice(header: Header) -> bytes | None:
        return usual(header._replace(request_id=header.request_id + 7)) if header.code == Verb.CLEAR else usual(header)

    with fake_router(run_dir, twice) as url:
        assert main(["clear", "--url", url, "--timeout", "0.2"]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nosuch"],
        ["reap"],
        ["reap", "x"],
        ["reap", "-1"],
        ["reap", "18446744073709551616"],
        ["reap", "1", "--generation", "1.5"],
        ["ping", "--timeout", "0"],
        ["ping", "--timeout", "nan"],
        ["ping", "--timeout", "soon"],
        ["ping", "--verbose"],
        ["--json", "serve"],
        ["--json", "top"],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: Output) -> None:
    assert usage_error(*arguments) == 2
    assert re.fullmatch(r"lmlive: [^\n]+; see lmlive.* --help\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["reap", "abc"], "INSTANCE_ID: instance_id is 'abc' but must be a decimal number from 0 to 2**64 - 1"),
        (
            ["reap", "1", "--generation", "x"],
            "--generation: generation is 'x' but must be a decimal number from 0 to 2**64 - 1",
        ),
        (
            ["ping", "--timeout", "0"],
            "--timeout: timeout is '0' but must be a number of seconds above 0, at most a day",
        ),
    ],
)
def test_a_wrong_argument_is_refused_like_a_servers_flag(arguments: list[str], line: str, capsys: Output) -> None:
    assert usage_error(*arguments) == 2
    assert capsys.readouterr().err == f"lmlive: {line}; see lmlive {arguments[0]} --help\n"


@pytest.mark.parametrize(
    "url", ["", "nonsense", "http://localhost:80", "tcp://host", "ipc://" + "x" * 200, "ipc://\udc80"]
)
def test_an_address_of_another_form_is_wrong_usage(url: str, capsys: Output) -> None:
    assert main(["ping", "--url", url]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lmlive: --url: ")
    assert "give ipc:///path or tcp://host:port" in err


def test_a_wrong_address_is_blamed_on_what_gave_it(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLIVE_URL", "nonsense")
    assert main(["ping"]) == 2
    assert capsys.readouterr().err.startswith("lmlive: LMLIVE_URL: 'nonsense' is no address of a server")


@pytest.mark.parametrize("command", ["top", "events", "doctor", "bench"])
def test_what_comes_later_is_not_in_this_build(command: str, capsys: Output) -> None:
    assert main([command, "--anything"]) == 2
    assert capsys.readouterr().err == f"lmlive: {command} is not in this build\n"


def test_the_address_comes_from_the_flag_the_environment_or_the_run_dir(
    run_dir: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: str) -> str:
        main(["ping", "--timeout", "0.01", *arguments])
        return capsys.readouterr().err.split()[4].rstrip(":")

    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{run_dir}/x")
    assert asked() == f"ipc://{run_dir}/x/lmlive/router.sock"
    monkeypatch.setenv("LMLIVE_RUN_DIR", f"{run_dir}/r")
    assert asked() == f"ipc://{run_dir}/r/router.sock"
    monkeypatch.setenv("LMLIVE_URL", f"ipc://{run_dir}/u")
    assert asked() == f"ipc://{run_dir}/u"
    assert asked("--url", f"ipc://{run_dir}/f") == f"ipc://{run_dir}/f"


def test_a_run_dir_that_cannot_be_is_wrong_usage(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLIVE_RUN_DIR", "/" + "x" * 200)
    assert usage_error("ping") == 2
    err = capsys.readouterr().err
    assert err.startswith("lmlive: LMLIVE_RUN_DIR: run_dir is ")
    assert "--url" in err
    monkeypatch.delenv("LMLIVE_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 200)
    assert usage_error("ping") == 2
    assert capsys.readouterr().err.startswith("lmlive: XDG_RUNTIME_DIR: run_dir is ")
    monkeypatch.setenv("LMLIVE_ALLOW_SHORT_TIMEOUTS", "perhaps")
    assert usage_error("ping") == 2
    assert capsys.readouterr().err.startswith("lmlive: LMLIVE_ALLOW_SHORT_TIMEOUTS is 'perhaps' but ")


def test_nothing_heavy_is_imported() -> None:
    heavy = {"asyncio", "numpy", "torch", "aiohttp", "uvloop"}
    code = "import sys, lmlive.cli; print(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not heavy & set(run.stdout.split())


def test_serve_takes_the_servers_flags() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "lmlive.cli", "serve", "--pool-bytes", "many"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": ""},
    )
    assert run.returncode == 2
    assert "--pool-bytes" in run.stderr
    assert "many" in run.stderr


def test_a_json_log_is_json_from_its_first_line() -> None:
    command = [sys.executable, "-m", "lmlive.cli", "serve", "--log-format", "json", "--pool-bytes", "4000TiB"]
    environment = {**os.environ, "LMLIVE_FOO": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (run.returncode, run.stdout) == (1, "")
    first, *_, last = [json.loads(line) for line in run.stderr.splitlines()]
    assert "unknown variable LMLIVE_FOO is ignored" in str(first)
    assert re.search(r"pool_bytes: a pool of 4000\.0 TiB is over 80 % of the .* available \(at most ", str(last))


def test_whoever_stops_reading_ends_it_quietly(run_dir: Path) -> None:
    with fake_router(run_dir, answering()) as url:
        command = [sys.executable, "-m", "lmlive.cli", "status", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait() == 0
