"""The settings of a worker or scheduler inside an engine's process; keywords only, and no flags.

Only the keys may come from variables as well, because whoever runs an engine in a container hands secrets to it, and
not its program. They are read when a config is built, and only for what no keyword says.
"""

import os
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path

from lmlive.config.keys import OWN_KEY_RULE, SERVER_KEY_RULE, ClientKeys, client_keys
from lmlive.config.settings import Kind, Setting, choice, refusal, seconds, settings_of, switch


def _key(rule: str) -> Kind:
    def check(value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise ValueError
        return str(value)

    return Kind(rule, check)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How patient a worker is, which way its KV travels, and with which keys; valid once it exists.

    Args:
        environ: Where the keys' variables are read; ``os.environ`` by default. The other arguments are the settings
            below; docs/configuration.md has them in one table.

    Raises:
        ConfigError: A value breaks its rule; the error has ``field``, ``value`` and ``rule``.
    """

    connect_timeout: Setting[float, float] = Setting(1.0, seconds(above=0.0), "patience with one attempt to connect")
    lookup_timeout: Setting[float, float] = Setting(0.2, seconds(above=0.0), "patience with LOOKUP")
    request_timeout: Setting[float, float] = Setting(
        5.0, seconds(above=0.0), "deadline of a request that names none, and of entering"
    )
    heartbeat_interval: Setting[float, float] = Setting(10.0, seconds(above=0.0), "time between two PINGs")
    heartbeat_timeout: Setting[float, float] = Setting(5.0, seconds(above=0.0), "patience with one PING")
    heartbeat_start: Setting[str, str] = Setting(
        "first_request", choice("first_request", "register"), "what the first PING waits for"
    )
    mode: Setting[str, str] = Setting(
        "auto", choice("auto", "server_driven", "engine_driven"), "who copies KV: the server or the engine"
    )
    strategy: Setting[str, str] = Setting(
        "auto", choice("auto", "shm", "inline"), "how KV travels where the engine copies it"
    )
    device: Setting[str, str] = Setting("auto", choice("auto", "host", later=("cuda", "fake-cuda")), "kind of memory")
    strict: Setting[bool, bool] = Setting(
        False, switch(), "raise where a request fails, instead of returning a result that says so"
    )
    curve_secret_key: Setting[str | Path | None, str | None] = Setting(
        None,
        _key(OWN_KEY_RULE),
        "this side's certificate for a tcp:// server with keys; none means a new pair for each connection",
    )
    curve_server_key: Setting[str | Path | None, str | None] = Setting(
        None, _key(SERVER_KEY_RULE), "whom to connect to over tcp://; none means a server without keys"
    )
    environ: InitVar[Mapping[str, str] | None] = None

    def __post_init__(self, environ: Mapping[str, str] | None) -> None:
        environ = os.environ if environ is None else environ
        settings = settings_of(type(self))
        if self.curve_secret_key and not (self.curve_server_key or environ.get(settings["curve_server_key"].variable)):
            raise refusal(settings["curve_server_key"], None, f"{SERVER_KEY_RULE}, where there is a curve_secret_key")
        for name in ("curve_secret_key", "curve_server_key"):
            setting = settings[name]
            if not getattr(self, name) and (given := environ.get(setting.variable)):
                vars(self)[name] = setting.checked(given)

    def wants_keys(self, url: str) -> bool:
        """Tell whether keys are for a server at this address; those of unix sockets need none."""
        return self.curve_server_key is not None and url.startswith("tcp://")

    def read_keys(self, url: str) -> ClientKeys | None:
        """Read the keys for a server at this address, which blocks; None without any.

        Raises:
            ConfigError: A key cannot be read.
        """
        return client_keys(self.curve_secret_key, self.curve_server_key) if self.wants_keys(url) else None
