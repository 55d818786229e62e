"""What a server's settings say where text comes in: the exact words of refusals and warnings, and what is true."""

import importlib.util
import logging

import pytest

from lmlive.config import ServerConfig
from lmlive.config.settings import settings_of
from lmlive.errors import ConfigError
from lmlive.server.assembly import check_extras


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--nonsense"], "--nonsense: unknown flag, it must be one that --help lists"),
        (["--chunk-token=3"], "--chunk-token: unknown flag, it must be one that --help lists (--chunk-tokens?)"),
        (["--quotas", "3"], "--quotas: unknown flag, it must be one that --help lists"),
        (["-x\n"], r"'-x\n': unknown flag, it must be one that --help lists"),
        (["stray"], "'stray' follows no flag but must be the value of a flag before it, --help lists them"),
        (["--chunk-tokens"], "--chunk-tokens: chunk_tokens has no value but must be a whole number from 1 to 65,536"),
        (
            ["--http", "--evidence"],
            f"--http: http has no value but must be {settings_of(ServerConfig)['http'].kind.rule}",
        ),
        (["--config"], "--config: config has no value but must be a readable TOML file"),
        (["--config="], "--config: config is '' but must be a readable TOML file: Is a directory"),
        (
            ["--no-evidence=x"],
            "--no-evidence: evidence is 'x' but must be given without a value (--evidence or --no-evidence)",
        ),
        (["--chunk-tokens", "0"], "--chunk-tokens: chunk_tokens is 0 but must be a whole number from 1 to 65,536"),
    ],
)
def test_a_refused_command_line_names_flag_value_and_rule_in_one_line(argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig.from_args(argv, {})
    assert str(caught.value) == line


def test_help_is_given_whatever_comes_after_it() -> None:
    with pytest.raises(SystemExit) as left:
        ServerConfig.from_args(["--help", "--nonsense"], {})
    assert left.value.code == 0


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", "True"])
def test_texts_that_are_true(text: str) -> None:
    assert ServerConfig.from_env({"LMLIVE_EVIDENCE": text}).evidence
    assert ServerConfig.from_env({"LMLIVE_ALLOW_SHORT_TIMEOUTS": text}).short_timeouts


@pytest.mark.parametrize("text", ["0", "false", "No", " off", "FALSE"])
def test_texts_that_are_false(text: str) -> None:
    assert not ServerConfig.from_env({"LMLIVE_EVIDENCE": text}).evidence
    assert not ServerConfig.from_env({"LMLIVE_ALLOW_SHORT_TIMEOUTS": text}).short_timeouts


@pytest.mark.parametrize("text", ["2", "y", "t", "enabled", "-1", "1.0", "not", " "])
@pytest.mark.parametrize("variable", ["LMLIVE_EVIDENCE", "LMLIVE_ALLOW_SHORT_TIMEOUTS"])
def test_other_texts_are_no_truth_values(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match="1/0, true/false, yes/no or on/off") as caught:
        ServerConfig.from_env({variable: text})
    assert str(caught.value).startswith(variable)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "environ", "start"),
    [
        (["--http", "127.0.0.1:0"], {}, "--http: http is"),
        ([], {"LMLIVE_HTTP": "127.0.0.1:0"}, "LMLIVE_HTTP: http is"),
    ],
)
def test_a_value_that_turns_out_wrong_later_is_named_like_any_other(
    argv: list[str], environ: dict[str, str], start: str
) -> None:
    error = ServerConfig.from_args(argv, environ).refusal("http", "off today")
    assert str(error) == f"{start} '127.0.0.1:0' but must be off today"
    assert error.fields == {"field": "http", "value": "127.0.0.1:0", "rule": "off today"}


def test_http_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_extras(ServerConfig.from_args(["--http", "127.0.0.1:0"], {}))
    assert str(caught.value) == (
        "--http: http is '127.0.0.1:0' but must be off without aiohttp: install it with pip install 'lmlive[ops]'"
    )
    check_extras(ServerConfig(environ={}))


def test_a_tier_in_valkey_needs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_extras(ServerConfig.from_env({"LMLIVE_TIER": "file:///a/kv,valkey://me:sesame@h"}))
    assert str(caught.value) == (
        "LMLIVE_TIER: tier is ('file:///a/kv', 'valkey://me:...@h') but must be file:// without valkey: "
        "install it with pip install 'lmlive[valkey]'"
    )
    check_extras(ServerConfig(environ={}, tier="file:///a/kv"))


PLACES = ["valkey://me:sesame@h", "redis://:sesame@h:1/2?ttl=5", "valkeys://me:sesame@h@x"]
WRONG = ["valkey://me:sesame@h:x", "valkey:sesame@h", "valky://me:sesame@h", "valkey://me:sesame@", ":sesame@h"]
WRONG += ["valkey://h?password=sesame&ttl=5", "valkey://h?Password=sesame"]


@pytest.mark.parametrize("url", [*PLACES, *WRONG])
def test_a_tiers_password_is_never_shown(url: str) -> None:
    told: list[str] = []
    try:
        told.append(repr(ServerConfig(environ={}, tier=[url])))
    except ConfigError as error:
        told += [str(error), repr(error.value)]
    for argv in (["--tier", url], ["--tier", "file:///a", url], [f"--tierr={url}"], ["--tier", url, "--tier", "x"]):
        try:
            config = ServerConfig.from_args(argv, {})
        except ConfigError as error:
            told += [str(error), repr(error.value)]
        else:
            told += [repr(config), str(config.refusal("tier", "another one")), repr(config.refusal("tier", "x").fields)]
    assert "sesame" not in "".join(told)
    assert url in PLACES or "..." in told[0]


def test_what_is_no_url_at_all_is_shown_as_it_is() -> None:
    with pytest.raises(ConfigError, match="tier is 5 but") as caught:
        ServerConfig(environ={}, tier=5)  # type: ignore[arg-type]
    assert caught.value.value == 5
    with pytest.raises(ConfigError, match=r"tier is \[5\] but"):
        ServerConfig(environ={}, tier=[5])  # type: ignore[list-item]


def test_a_value_of_an_embedding_program_comes_from_nowhere() -> None:
    assert (
        str(ServerConfig(environ={}, http="127.0.0.1:0").refusal("http", "off"))
        == "http is '127.0.0.1:0' but must be off"
    )


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("LMLIVE_FOO", None),
        ("LMLIVE_TEST_ANYTHING", None),
        ("LMLIVE_QUOTAS", None),  # of a later build
        ("LMLIVE_", None),
        ("LMLIVE_BINDS", "LMLIVE_BIND"),
        ("LMLIVE_RUNDIR", "LMLIVE_RUN_DIR"),
        ("LMLIVE_LOG_LEVLE", "LMLIVE_LOG_LEVEL"),
    ],
)
def test_a_slip_is_told_only_where_it_is_likely(variable: str, meant: str | None) -> None:
    warnings: list[str] = []
    ServerConfig.from_args([], {variable: "1"}, warn=warnings.append)
    assert warnings == [f"unknown variable {variable} is ignored{f', {meant} was meant?' if meant else ''}"]


def test_whoever_takes_the_warnings_has_them_instead_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    warnings: list[str] = []
    with caplog.at_level(logging.WARNING):
        ServerConfig.from_args([], {"LMLIVE_FOO": "1"}, warn=warnings.append)
    assert len(warnings) == 1
    assert not caplog.records
