import dataclasses
import logging
import math
import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.config import ServerConfig, WorkerConfig
from lmlive.config.addresses import UNIX_PATH_BYTES
from lmlive.config.settings import LARGEST_SIZE, Setting, bytes_of, settings_of
from lmlive.errors import ConfigError

SERVER = settings_of(ServerConfig)
IN_BUILD = {name: setting for name, setting in SERVER.items() if setting.kind.in_build}
NOT_IN_BUILD = {name: setting for name, setting in SERVER.items() if not setting.kind.in_build}

# For every setting of this build: values that differ from the default, as keyword, as text, and as kept.
OTHERS: dict[str, tuple[object, str, object]] = {
    "bind": (["tcp://127.0.0.1:0", "ipc:///a/b"], "tcp://127.0.0.1:0, ipc:///a/b", ("tcp://127.0.0.1:0", "ipc:///a/b")),
    "run_dir": ("/a/run", "/a/run", Path("/a/run")),
    "http": ("127.0.0.1:80", "127.0.0.1:80", "127.0.0.1:80"),
    "chunk_tokens": (64, "64", 64),
    "pool_bytes": ("3GiB", "3GiB", 3 << 30),
    "worker_reap_timeout_seconds": (60, "60", 60.0),
    "worker_registration_grace_seconds": (7200.5, "7200.5", 7200.5),
    "worker_alive_hold_seconds": (0, "0", 0.0),
    "evidence": (False, "0", False),
    "device": ("host", "host", "host"),
    "transfer_threads": (8, "8", 8),
    "register_threads": (1, "1", 1),
    "lease_seconds": (5.0, "5", 5.0),
    "drain_seconds": (0.0, "0", 0.0),
    "max_message_bytes": (1 << 20, "1MiB", 1 << 20),
    "max_tokens": (4096, "4096", 4096),
    "max_blocks": (10, "10", 10),
    "max_in_flight": (1, "1", 1),
    "max_connections": (16, "16", 16),
    "log_format": ("json", "json", "json"),
    "log_level": ("debug", "debug", "DEBUG"),
    "allow_uid": ([1000, 0], "1000, 0", (1000, 0)),
    "curve_secret_key": ("/a/server.key_secret", "/a/server.key_secret", Path("/a/server.key_secret")),
    "curve_authorized_keys": ("/a/keys", "/a/keys", Path("/a/keys")),
    "insecure_bind": (True, "1", True),
    "checksum": (True, "1", True),
    "tier": (
        ["file:///a/kv?size=1GiB", "valkey://h/1"],
        "file:///a/kv?size=1GiB, valkey://h/1",
        ("file:///a/kv?size=1GiB", "valkey://h/1"),
    ),
    "tier_wait_seconds": (0, "0", 0.0),
}

KEYED: dict[str, Any] = {"curve_secret_key": "/a/server.key_secret"}
# What a value needs beside it.
BESIDE: dict[str, dict[str, Any]] = {"curve_authorized_keys": KEYED}

REFUSED: list[tuple[str, object]] = [
    ("bind", "ipc://relative/path"),
    ("bind", "ipc://@abstract"),
    ("bind", "ipc://*"),
    ("bind", "ipc:///ends/"),
    ("bind", "ipc:///nul\0"),
    ("bind", "ipc:///" + "a" * UNIX_PATH_BYTES),
    ("bind", "inproc://x"),
    ("bind", "tcp://127.0.0.1"),
    ("bind", "tcp://127.0.0.1:65536"),
    ("bind", "tcp://127.0.0.1:*"),
    ("bind", "tcp://0.0.0.0:1"),
    ("bind", "tcp://*:1"),
    ("bind", "tcp://example.org:1"),
    ("bind", "tcp://[::]:1"),
    ("bind", "/a/b"),
    ("bind", ""),
    ("bind", 5),
    ("bind", [5]),
    ("bind", ["ipc:///a", "ipc:///a"]),
    ("bind", ["ipc:///a", "ipc:///a.tether"]),
    ("bind", ["ipc:///a", "ipc:///a.lock"]),
    ("run_dir", ""),
    ("run_dir", "/nul\0"),
    ("run_dir", 5),
    ("run_dir", "/" + "a" * UNIX_PATH_BYTES),
    ("http", "on"),
    ("http", "0.0.0.0:1"),
    ("http", ":1"),
    ("http", None),
    ("chunk_tokens", 0),
    ("chunk_tokens", 65_537),
    ("chunk_tokens", True),
    ("chunk_tokens", 256.0),
    ("chunk_tokens", "256"),
    ("pool_bytes", 0),
    ("pool_bytes", -1),
    ("pool_bytes", True),
    ("pool_bytes", "1MB"),
    ("pool_bytes", "2 gigabytes"),
    ("pool_bytes", "2G"),
    ("pool_bytes", "-2GiB"),
    ("pool_bytes", "nan"),
    ("pool_bytes", 2.0**31),
    ("pool_bytes", "99999999999TiB"),
    ("worker_reap_timeout_seconds", 29.9),
    ("worker_reap_timeout_seconds", 0.001),
    ("worker_reap_timeout_seconds", -1),
    ("worker_reap_timeout_seconds", math.nan),
    ("worker_reap_timeout_seconds", math.inf),
    ("worker_reap_timeout_seconds", True),
    ("worker_reap_timeout_seconds", "120"),
    ("worker_registration_grace_seconds", 119.9),
    ("worker_alive_hold_seconds", -0.1),
    ("worker_alive_hold_seconds", math.nan),
    ("evidence", 1),
    ("evidence", "yes"),
    ("device", "tpu"),
    ("device", "cuda"),
    ("device", "fake-cuda"),
    ("device", None),
    ("transfer_threads", 0),
    ("transfer_threads", 65),
    ("lease_seconds", 0),
    ("drain_seconds", -math.inf),
    ("drain_seconds", 10**400),
    ("max_message_bytes", 100),
    ("max_message_bytes", "2GiB"),
    ("max_tokens", 255),
    ("log_format", "xml"),
    ("log_level", "LOUD"),
    ("allow_uid", -1),
    ("allow_uid", [1000, -1]),
    ("allow_uid", [1000, 1000]),
    ("allow_uid", 2**32 - 1),
    ("allow_uid", True),
    ("allow_uid", "root"),
    ("allow_uid", "1.5"),
    ("allow_uid", [1.5]),
    ("allow_uid", None),
    ("curve_secret_key", ""),
    ("curve_secret_key", "/nul\0"),
    ("curve_secret_key", 5),
    ("curve_authorized_keys", ""),
    ("curve_authorized_keys", 5),
    ("curve_authorized_keys", "/a/without/a/secret/key"),
    ("insecure_bind", 1),
    ("insecure_bind", "yes"),
    ("checksum", "yes"),
    ("tier", "/a/kv"),
    ("tier", "file://a/kv"),
    ("tier", "file:///"),
    ("tier", "file:///a?size=0"),
    ("tier", "file:///a?ttl=5"),
    ("tier", "s3://bucket"),
    ("tier", "valkey://"),
    ("tier", "valkey://h:port"),
    ("tier", "valkey://h/x"),
    ("tier", "valkey://h?ttl=0"),
    ("tier", "valkey://h?timeout=nan"),
    ("tier", "valkey://h/1?cluster=true"),
    ("tier", "valkey://h?password=x"),
    ("tier", ["file:///a", "file:///a"]),
    ("tier", [f"file:///{name}" for name in "abcde"]),
    ("tier", 5),
    ("tier_wait_seconds", -1),
    ("tier_wait_seconds", math.nan),
]


def server(**settings: Any) -> ServerConfig:
    return ServerConfig(environ={}, **settings)


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://*:1", "tcp://10.0.0.1:0", "tcp://example.org:1"]
)
def test_an_address_that_others_reach_needs_keys_or_a_word(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--curve-secret-key.*--insecure-bind") as caught:
        server(bind=["ipc:///a/b", url])
    assert caught.value.fields["value"] == url
    with pytest.raises(ConfigError, match=r"^--bind: bind is"):
        ServerConfig.from_args(["--bind", url], {})
    assert server(bind=url, insecure_bind=True).bind_urls == (url,)
    assert server(bind=url, **KEYED).bind_urls == (url,)
    assert ServerConfig.from_args(["--bind", url, "--insecure-bind"], {}).insecure_bind


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:1", "tcp://127.1.2.3:1", "tcp://[::1]:1", "tcp://localhost:1"])
def test_loopback_needs_neither(url: str) -> None:
    assert server(bind=url).bind_urls == (url,)


def test_keys_do_not_open_http_to_others() -> None:
    with pytest.raises(ConfigError, match="HTTP has no keys"):
        server(http="0.0.0.0:1", insecure_bind=True, **KEYED)


def test_defaults() -> None:
    config = server()
    assert config.run_path == Path(f"/tmp/lmlive-{os.getuid()}")
    assert config.bind_urls == (f"ipc://{config.run_path}/router.sock",)
    assert config.http_address is None
    assert config.pool_bytes == 2 << 30
    assert config.max_message_bytes == 1 << 20
    assert config.worker_reap_timeout_seconds == 120.0
    assert config.worker_registration_grace_seconds == 3600.0
    assert config.worker_alive_hold_seconds == 600.0
    assert config.evidence
    assert not config.short_timeouts
    assert repr(config) == "ServerConfig()"
    assert config == ServerConfig.from_args([], {}) == ServerConfig.from_env({})


def test_every_setting_has_another_value_in_these_tests() -> None:
    assert OTHERS.keys() == IN_BUILD.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_keyword_a_flag_a_variable_and_a_file_say_the_same(name: str, tmp_path: Path) -> None:
    keyword, text, kept = OTHERS[name]
    setting = IN_BUILD[name]
    beside = BESIDE.get(name, {})
    config = server(**{name: keyword}, **beside)
    assert getattr(config, name) == kept
    environ = {SERVER[other].variable: value for other, value in beside.items()}
    assert ServerConfig.from_env({setting.variable: text, **environ}) == config
    flags: list[str] = []
    for other, value in beside.items():
        flags += [SERVER[other].flag, value]
    if setting.kind.switch:
        flags += [f"--no-{name}" if setting.default else setting.flag]
    else:
        for part in text.split(", "):
            flags += [setting.flag, part]
    assert ServerConfig.from_args(flags, {}) == config
    file = tmp_path / "lmlive.toml"
    file.write_text("".join(f"{key} = {toml(value)}\n" for key, value in {name: keyword, **beside}.items()))
    assert ServerConfig.from_file(file) == config
    assert ServerConfig.from_args(["--config", str(file)], {}) == config
    assert ServerConfig.from_env({"LMLIVE_CONFIG": str(file)}) == config


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


@given(st.sets(st.sampled_from(["flag", "variable", "file"])), st.data())
def test_flags_beat_variables_beat_the_file(
    tmp_path_factory: pytest.TempPathFactory, sources: set[str], data: st.DataObject
) -> None:
    value = {source: data.draw(st.integers(1, 65_536), label=source) for source in ("file", "variable", "flag")}
    file = tmp_path_factory.mktemp("config") / "lmlive.toml"
    file.write_text(f"chunk_tokens = {value['file']}" if "file" in sources else "")
    argv = ["--config", str(file)] + (["--chunk-tokens", str(value["flag"])] if "flag" in sources else [])
    environ = {"LMLIVE_CHUNK_TOKENS": str(value["variable"])} if "variable" in sources else {}
    strongest = next((source for source in ("flag", "variable", "file") if source in sources), None)
    expected = value[strongest] if strongest else 256
    assert ServerConfig.from_args(argv, environ).chunk_tokens == expected


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:40])
def test_a_refusal_names_the_field_the_value_and_the_rule(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        server(**{name: value})
    error = caught.value
    assert error.field == name
    assert name in str(error)
    assert error.rule in str(error)
    assert repr(error.value)[:100] in str(error)


# Refused as text too, where text is what comes in.
REFUSED_TEXTS = [
    (name, value)
    for name, value in REFUSED
    if isinstance(value, str) and "\0" not in value and SERVER[name].kind.parse not in (int, float)
    if not SERVER[name].kind.switch
]


@pytest.mark.parametrize(("name", "value"), REFUSED_TEXTS)
def test_a_refused_flag_and_variable_are_named(name: str, value: str) -> None:
    setting = SERVER[name]
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_args([setting.flag, value], {})
    assert str(caught.value).startswith(f"{setting.flag}: {name} is ")
    if not value:
        return  # an empty variable counts as unset
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_env({setting.variable: value})
    assert str(caught.value).startswith(f"{setting.variable}: {name} is ")


def test_a_rule_between_two_settings_names_a_flag_even_where_its_value_is_the_default() -> None:
    with pytest.raises(ConfigError, match=r"--worker-registration-grace-seconds.*3600.*4000"):
        ServerConfig.from_args(["--worker-reap-timeout-seconds", "4000"], {})


@pytest.mark.parametrize("argv", [["--nonsense"], ["--chunk-tokens"], ["--chunk", "1"], ["stray"], ["--evidence=1"]])
def test_a_wrong_command_line_is_a_config_error(argv: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_args(argv, {})
    assert argv[0].partition("=")[0] in str(caught.value)


@pytest.mark.parametrize("name", NOT_IN_BUILD)
def test_settings_of_later_builds_say_so(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setting = NOT_IN_BUILD[name]
    keyword = True if setting.kind.switch else ("5",) if setting.kind.many else "x"
    flags = [setting.flag] if setting.kind.switch else [setting.flag, "5"]
    file = tmp_path / "lmlive.toml"
    file.write_text(f"{name} = {'true' if setting.kind.switch else repr('x')}\n")
    builds: list[Callable[[], ServerConfig]] = [
        lambda: server(**{name: keyword}),
        lambda: ServerConfig.from_args(flags, {}),
        lambda: ServerConfig.from_env({setting.variable: "1"}),
        lambda: ServerConfig.from_file(file),
    ]
    for build in builds:
        with pytest.raises(ConfigError, match="not in this build") as caught:
            build()
        assert caught.value.field == name
    with pytest.raises(SystemExit):
        ServerConfig.from_args(["--help"], {})
    assert setting.flag not in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cuda", "fake-cuda"])
def test_later_devices_say_so(device: str) -> None:
    with pytest.raises(ConfigError, match=r"--device.*not in this build"):
        ServerConfig.from_args(["--device", device], {})


def test_help_names_every_flag_and_leaves_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        ServerConfig.from_args(["--help"], {})
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(setting.flag in shown for setting in IN_BUILD.values())
    assert "--no-evidence" in shown


def test_version_leaves_with_zero(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        ServerConfig.from_args(["--version"], {})
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("lmlive ")


def test_evidence_can_be_given_back_by_a_flag() -> None:
    assert not ServerConfig.from_args([], {"LMLIVE_EVIDENCE": "off"}).evidence
    assert ServerConfig.from_args(["--evidence"], {"LMLIVE_EVIDENCE": "off"}).evidence


def test_unknown_variables_warn_and_known_ones_do_not(caplog: pytest.LogCaptureFixture) -> None:
    known = {
        "LMLIVE_URL": "ipc:///x",
        "LMLIVE_ALLOW_SHORT_TIMEOUTS": "0",
        "LMLIVE_FAKE_CUDA_FAULTS": "",
        "LMLIVE_CONFIG": "",
        "LMLIVE_CURVE_SERVER_KEY": "x",
        "LMLIVE_CHUNK_TOKENS": "",
        "OTHER": "1",
    }
    with caplog.at_level(logging.WARNING):
        assert ServerConfig.from_env(known) == server()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        ServerConfig.from_args([], {"LMLIVE_CHUNK_TOKEN": "64"})
    assert [record.name for record in caplog.records] == ["lmlive.config"]
    assert caplog.messages == ["unknown variable LMLIVE_CHUNK_TOKEN is ignored, LMLIVE_CHUNK_TOKENS was meant?"]


@pytest.mark.parametrize(
    "text", ["chunk_token = 1", "chunk_tokens = 1\n[server]\nx = 1", "environ = {}", "config = 'x'"]
)
def test_an_unknown_key_in_a_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lmlive.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"lmlive.toml: .* must be the name of a setting"):
        ServerConfig.from_file(file)


@pytest.mark.parametrize("content", [None, b"no toml", b"\xff"])
def test_an_unreadable_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "lmlive.toml"
    if content is not None:
        file.write_bytes(content)
    builds: dict[str, Callable[[], ServerConfig]] = {
        "--config: config is ": lambda: ServerConfig.from_args(["--config", str(file)], {"LMLIVE_CONFIG": "/other"}),
        "LMLIVE_CONFIG: config is ": lambda: ServerConfig.from_args([], {"LMLIVE_CONFIG": str(file)}),
        "config is ": lambda: ServerConfig.from_file(file),
    }
    for start, build in builds.items():
        with pytest.raises(ConfigError, match="readable TOML") as caught:
            build()
        assert str(caught.value).startswith(f"{start}{str(file)!r} but must be ")
        assert caught.value.field == "config"


def test_a_wrong_value_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "lmlive.toml"
    file.write_text("chunk_tokens = '64'")
    with pytest.raises(ConfigError, match=r"lmlive.toml: chunk_tokens"):
        ServerConfig.from_file(file)


def test_short_timeouts_need_the_environments_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
    config = ServerConfig(environ=allowed, worker_reap_timeout_seconds=0.5, worker_registration_grace_seconds=0.5)
    assert config.short_timeouts
    assert ServerConfig.from_args(["--worker-reap-timeout-seconds", "1"], allowed).short_timeouts
    monkeypatch.setenv("LMLIVE_ALLOW_SHORT_TIMEOUTS", "1")
    assert ServerConfig(worker_reap_timeout_seconds=2.0).short_timeouts
    monkeypatch.delenv("LMLIVE_ALLOW_SHORT_TIMEOUTS")
    with pytest.raises(ConfigError, match="at least 30"):
        ServerConfig(worker_reap_timeout_seconds=2.0)


def test_silence_can_be_switched_off() -> None:
    config = server(worker_reap_timeout_seconds=0, worker_registration_grace_seconds=0)
    assert config.worker_reap_timeout_seconds == 0.0


def test_the_run_dir_follows_the_environment() -> None:
    assert ServerConfig(environ={"XDG_RUNTIME_DIR": "/run/user/7"}).run_path == Path("/run/user/7/lmlive")
    assert ServerConfig(environ={"XDG_RUNTIME_DIR": "relative"}).run_path.parent == Path("/tmp")
    assert server(run_dir="here").run_path == Path.cwd() / "here"
    assert server(run_dir=Path("/a")).bind_urls == ("ipc:///a/router.sock",)


def test_a_long_run_dir_is_fine_where_nothing_is_bound_in_it() -> None:
    assert server(run_dir="/" + "a" * 200, bind="tcp://127.0.0.1:0").bind_urls == ("tcp://127.0.0.1:0",)


def test_the_longest_ipc_path_leaves_room_for_its_tether() -> None:
    longest = "/" + "a" * (UNIX_PATH_BYTES - len("/.tether"))
    assert server(bind=f"ipc://{longest}").bind_urls == (f"ipc://{longest}",)
    with pytest.raises(ConfigError, match="107"):
        server(bind=f"ipc://{longest}a")


def test_a_socket_may_not_take_the_run_dirs_lock() -> None:
    with pytest.raises(ConfigError, match="lock"):
        server(run_dir="/a", bind="ipc:///a/lock")


@pytest.mark.parametrize(
    ("address", "split"),
    [("localhost:0", ("localhost", 0)), ("127.0.0.9:80", ("127.0.0.9", 80)), ("[::1]:443", ("::1", 443))],
)
def test_loopback_addresses(address: str, split: tuple[str, int]) -> None:
    assert server(http=address).http_address == split
    assert server(bind=f"tcp://{address}").bind == (f"tcp://{address}",)


def test_configs_are_frozen_replaceable_and_comparable() -> None:
    config = server(chunk_tokens=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.chunk_tokens = 1  # type: ignore[misc]
    assert dataclasses.replace(config, chunk_tokens=256, environ={}) == server()
    assert hash(config) == hash(server(chunk_tokens=64))
    assert repr(config) == "ServerConfig(chunk_tokens=64)"
    with pytest.raises(TypeError):
        ServerConfig(64)  # type: ignore[call-arg,arg-type]


@given(st.integers(0, LARGEST_SIZE))
def test_a_size_in_bytes_reads_back(size: int) -> None:
    assert bytes_of(str(size)) == bytes_of(f"{size}B") == bytes_of(f" {size} b ") == size


@given(
    st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"])
)
def test_a_size_with_a_unit_is_exact(whole: int, thousandths: int, unit: str) -> None:
    factor = (1024 if "i" in unit else 1000) ** ("KMGT".index(unit[0].upper()) + 1)
    assert bytes_of(f"{whole}.{thousandths:03}{unit}") == (whole * 1000 + thousandths) * factor // 1000
    assert bytes_of(f"{whole} {unit.lower()}") == whole * factor


@given(st.text(alphabet=string.printable + "٣²", max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        config = server(pool_bytes=text)
    except ConfigError as error:
        assert error.field == "pool_bytes"
    else:
        assert 1 << 20 <= config.pool_bytes <= LARGEST_SIZE


@given(st.dictionaries(st.sampled_from(sorted(SERVER)), st.text(max_size=20)))
def test_any_environment_gives_a_config_or_a_config_error(texts: dict[str, str]) -> None:
    try:
        ServerConfig.from_env({SERVER[name].variable: text for name, text in texts.items()})
    except ConfigError as error:
        assert error.field in SERVER


@given(st.lists(st.one_of(st.sampled_from([s.flag for s in SERVER.values()]), st.text(max_size=8)), max_size=6))
def test_any_command_line_gives_a_config_or_a_config_error(argv: list[str]) -> None:
    if any(word in ("-h", "--help", "--version") for word in argv):
        return
    try:
        ServerConfig.from_args(argv, {})
    except ConfigError as error:
        assert str(error)


def test_worker_defaults() -> None:
    config = WorkerConfig()
    assert (config.connect_timeout, config.lookup_timeout, config.request_timeout) == (1.0, 0.2, 5.0)
    assert (config.heartbeat_interval, config.heartbeat_timeout, config.heartbeat_start) == (10.0, 5.0, "first_request")
    assert (config.mode, config.strategy, config.device, config.strict) == ("auto", "auto", "auto", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connect_timeout", 0),
        ("lookup_timeout", -1.0),
        ("request_timeout", math.inf),
        ("heartbeat_interval", math.nan),
        ("heartbeat_timeout", "5"),
        ("heartbeat_start", "never"),
        ("mode", "both"),
        ("strategy", "pigeon"),
        ("device", "tpu"),
        ("strict", 1),
    ],
)
def test_a_worker_config_refuses(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert caught.value.rule in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("device", "cuda"), ("device", "fake-cuda")])
def test_what_workers_of_later_builds_do_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="not in this build"):
        WorkerConfig(**{name: value})  # type: ignore[arg-type]


def test_every_setting_of_this_build_says_what_it_is_about() -> None:
    every: list[Setting[Any, Any]] = [*IN_BUILD.values(), *settings_of(WorkerConfig).values()]
    assert all(setting.about for setting in every)
