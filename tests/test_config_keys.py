"""Keys in files, as a server and a worker read them."""

import logging
import os
import string
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from lmlive.config import ServerConfig, WorkerConfig
from lmlive.config.keys import Certificate, ClientKeys, client_keys, raw_key, read_certificate, server_certificate
from lmlive.errors import ConfigError
from lmlive.server.curve import DoorKeys, door_keys
from tests.keys import Keys


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_a_certificate_is_read_as_zeromq_reads_it(keys: Keys) -> None:
    assert tuple(server_certificate(keys.secret("server"))) == zmq.auth.load_certificate(keys.secret("server"))
    assert tuple(read_certificate(keys.public("server"))) == zmq.auth.load_certificate(keys.public("server"))


def test_a_key_is_decoded_as_zeromq_decodes_it() -> None:
    for _ in range(200):
        public, secret = zmq.curve_keypair()
        assert raw_key(public) == z85.decode(public)
        assert raw_key(secret.decode()) == z85.decode(secret)


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "#" * 40, "\u00e4" * 40, ";" + "0" * 39, "0" * 39 + " "])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - it has no words
        raw_key(text)


def test_a_secret_is_not_shown(keys: Keys) -> None:
    certificate = server_certificate(keys.secret("server"))
    assert certificate.secret is not None
    assert certificate.secret.decode() not in repr(ClientKeys(b"", certificate))
    assert certificate.public.decode() in f"{certificate}"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o601])
def test_a_servers_secret_that_others_may_read_is_refused(keys: Keys, mode: int) -> None:
    path = keys.secret("server")
    path.chmod(mode)
    config = ServerConfig.from_args(["--curve-secret-key", str(path)], {})
    with pytest.raises(ConfigError, match=rf"^--curve-secret-key: .*chmod 600 {path}$") as caught:
        door_keys(config)
    assert caught.value.fields["field"] == "curve_secret_key"


def test_a_secret_in_a_directory_of_its_owners_alone_is_private(keys: Keys) -> None:
    keys.secret("server").chmod(0o644)
    keys.directory.chmod(0o700)
    assert server_certificate(keys.secret("server")).secret
    keys.directory.chmod(0o710)
    with pytest.raises(ConfigError, match="nobody else"):
        server_certificate(keys.secret("server"))


def test_a_secret_that_root_lends_to_a_group_is_private(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keys.secret("server")
    if path.stat().st_uid:
        pytest.skip("needs a file of root's")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    path.chmod(0o440)
    assert server_certificate(path).secret
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="nobody else"):
        server_certificate(path)


def test_a_workers_secret_that_others_may_read_is_told(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert client_keys(keys.secret("friend"), keys.public("server"))
        assert not caplog.records
        keys.secret("friend").chmod(0o644)
        assert client_keys(keys.secret("friend"), keys.public("server"))
    assert caplog.messages == [f"others may read the secret key in {keys.secret('friend')}: chmod 600 it"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "No such file"),
        ("", "a file with a secret key"),
        ('public-key = "short"', "a file with a secret key"),
        (f'public-key = "{"0" * 40}"', "the public key alone"),
        (f'secret-key = "{"0" * 40}"', "a file with a secret key"),
        (f'public-key = "{"0" * 40}"\nsecret-key = "{"~" * 40}"', "a file with a secret key"),
    ],
)
def test_a_secret_key_that_is_none_is_refused_by_name(keys: Keys, content: str | None, fault: str) -> None:
    path = keys.secret("server")
    path.unlink()
    if content is not None:
        path.touch(mode=0o600)
        path.write_text(content)
    for read in (
        lambda: door_keys(ServerConfig(curve_secret_key=path, environ={})),
        lambda: client_keys(path, keys.public("server")),
    ):
        with pytest.raises(ConfigError, match=fault) as caught:
            read()
        assert caught.value.fields["field"] == "curve_secret_key"
        assert str(path) in str(caught.value)


def test_the_authorized_keys_are_a_directory_of_certificates(keys: Keys) -> None:
    config = ServerConfig(environ={}, **keys.at_the_server)
    assert door_keys(config) == DoorKeys(keys.certificate("server"), keys.authorized)
    (keys.authorized / "secret.key_secret").write_text("is not looked at")
    assert door_keys(config) is not None
    (keys.authorized / "bad.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"bad\.key is none: it has no public key") as caught:
        door_keys(config)
    assert caught.value.fields["field"] == "curve_authorized_keys"
    missing = ServerConfig(environ={}, **{**keys.at_the_server, "curve_authorized_keys": keys.directory / "nowhere"})
    with pytest.raises(ConfigError, match="No such file"):
        door_keys(missing)


def test_without_a_secret_key_there_are_no_keys() -> None:
    assert door_keys(ServerConfig(environ={})) is None
    assert client_keys(None, None) is None
    assert WorkerConfig(environ={}).read_keys("tcp://127.0.0.1:1") is None


def test_a_worker_takes_the_servers_key_as_text_or_file(keys: Keys) -> None:
    public = keys.certificate("server").public
    for given in (public.decode(), str(keys.public("server")), keys.public("server")):
        config = WorkerConfig(curve_server_key=given, environ={})
        assert config.read_keys("tcp://127.0.0.1:1") == ClientKeys(public)
        assert config.read_keys("ipc:///a/b") is None
    both = WorkerConfig(**keys.of("friend"), environ={})
    assert both.read_keys("tcp://127.0.0.1:1") == ClientKeys(public, keys.certificate("friend"))


@pytest.mark.parametrize("given", ["/nowhere/server.key", string.ascii_letters[:40] + "~", "x"])
def test_a_servers_key_that_is_none_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        WorkerConfig(curve_server_key=given, environ={}).read_keys("tcp://127.0.0.1:1")
    assert caught.value.fields["field"] == "curve_server_key"
    assert given in str(caught.value)


@pytest.mark.parametrize("value", ["", "/nul\0", 5, b"bytes"])
@pytest.mark.parametrize("name", ["curve_secret_key", "curve_server_key"])
def test_a_worker_config_refuses_what_is_no_file(name: str, value: object) -> None:
    given: dict[str, object] = {"curve_server_key": "x", name: value}
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(**given, environ={})  # type: ignore[arg-type]
    assert caught.value.fields["field"] == name


def test_a_worker_with_a_key_of_its_own_needs_the_servers() -> None:
    with pytest.raises(ConfigError, match="where there is a curve_secret_key") as caught:
        WorkerConfig(curve_secret_key=Path("x"), environ={})
    assert caught.value.fields["field"] == "curve_server_key"


def test_variables_say_what_no_keyword_says(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"LMLIVE_CURVE_SECRET_KEY": "/a/secret", "LMLIVE_CURVE_SERVER_KEY": "/a/server"}
    config = WorkerConfig(environ=variables)
    assert (config.curve_secret_key, config.curve_server_key) == ("/a/secret", "/a/server")
    config = WorkerConfig(curve_server_key="/b/server", environ=variables)
    assert (config.curve_secret_key, config.curve_server_key) == ("/a/secret", "/b/server")
    config = WorkerConfig(curve_secret_key=Path("/b/secret"), environ=variables)
    assert (config.curve_secret_key, config.curve_server_key) == ("/b/secret", "/a/server")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert WorkerConfig().curve_server_key == "/a/server"
    # A server's own variable, in a program that has both, is no worker's.
    assert WorkerConfig(environ={"LMLIVE_CURVE_SECRET_KEY": "/a"}).read_keys("tcp://127.0.0.1:1") is None


def test_a_certificate_has_two_halves() -> None:
    assert Certificate(b"p") == (b"p", None)
