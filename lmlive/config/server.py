"""The settings of a server.

Precedence: flags beat the environment, the environment beats the file, the file beats the defaults. An embedding
program passes keywords and gets the same rules. ``LMLIVE_ALLOW_SHORT_TIMEOUTS`` and ``XDG_RUNTIME_DIR`` are read from
the environment whichever way a config is built.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Self

from lmlive.config import sources
from lmlive.config.addresses import (
    BIND_RULE,
    HTTP_RULE,
    KEYLESS_RULE,
    SUFFIXES,
    bind_url,
    http_endpoint,
    is_reached_from_elsewhere,
    split_loopback,
    unix_path,
)
from lmlive.config.settings import (
    SWITCH_RULE,
    Kind,
    Setting,
    choice,
    count,
    directory,
    file,
    later,
    parse_switch,
    refusal,
    seconds,
    settings_of,
    size,
    switch,
    texts,
    uids,
)
from lmlive.config.tiers import MOST_TIERS, TIER_RULE, tier_url, without_password
from lmlive.errors import ConfigError

SHORTEST_REAP_TIMEOUT = 30.0
ALLOW_SHORT_TIMEOUTS = "LMLIVE_ALLOW_SHORT_TIMEOUTS"

_log = logging.getLogger("lmlive.config")


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerConfig:
    """Everything that a server can be told; valid once it exists.

    Args:
        environ: Where the environment's part is read; ``os.environ`` by default. The other arguments are the settings
            below; docs/configuration.md has them in one table.

    Raises:
        ConfigError: A value breaks its rule; the error has ``field``, ``value`` and ``rule``.
    """

    bind: Setting[str | Iterable[str], tuple[str, ...]] = Setting(
        (), texts(BIND_RULE, bind_url, "URL"), "addresses to bind; none means ipc://<run-dir>/router.sock"
    )
    run_dir: Setting[str | Path | None, Path | None] = Setting(
        None, directory(), "private directory of the server; none means $XDG_RUNTIME_DIR/lmlive, else /tmp/lmlive-<uid>"
    )
    http: Setting[str, str] = Setting(
        "off", Kind(HTTP_RULE, http_endpoint, shown="HOST:PORT|off"), "address for /status and /healthz"
    )
    chunk_tokens: Setting[int, int] = Setting(256, count(1, 65_536, "tokens"), "tokens of one chunk")
    pool_bytes: Setting[int | str, int] = Setting("2GiB", size("1MiB"), "host memory for stored chunks")
    worker_reap_timeout_seconds: Setting[float, float] = Setting(
        120.0, seconds(), "silence after which a worker that has pinged is reaped; 0: silence reaps nobody"
    )
    worker_registration_grace_seconds: Setting[float, float] = Setting(
        3600.0, seconds(), "silence after which a worker that never pinged is reaped"
    )
    worker_alive_hold_seconds: Setting[float, float] = Setting(
        600.0, seconds(), "how long a silent worker whose process is proven alive is kept beyond that; 0: not at all"
    )
    evidence: Setting[bool, bool] = Setting(
        True,
        switch(variable=True),
        "let the kernel's word on a worker's process count; without it silence alone decides",
    )
    device: Setting[str, str] = Setting(
        "host", choice("host", later=("cuda", "fake-cuda")), "where workers' memory is mapped from"
    )
    transfer_threads: Setting[int, int] = Setting(2, count(1, 64, "threads"), "threads that copy KV")
    register_threads: Setting[int, int] = Setting(4, count(1, 64, "threads"), "threads that open workers' memory")
    lease_seconds: Setting[float, float] = Setting(60.0, seconds(above=0.0), "life of a lookup's lease")
    drain_seconds: Setting[float, float] = Setting(10.0, seconds(), "patience with running requests at shutdown")
    max_message_bytes: Setting[int | str, int] = Setting("1MiB", size("4KiB", "1GiB"), "longest message of a worker")
    max_tokens: Setting[int, int] = Setting(1_048_576, count(1, 2**31 - 1, "tokens"), "most tokens of one request")
    max_blocks: Setting[int, int] = Setting(
        65_536, count(1, 2**31 - 1, "blocks"), "most blocks of one request, per KV group"
    )
    max_in_flight: Setting[int, int] = Setting(
        64, count(1, 65_536, "requests"), "most requests of one instance at a time; others get ServerBusy"
    )
    max_connections: Setting[int, int] = Setting(
        4096, count(1, 1_000_000, "connections"), "most connections at a time; others are refused at the handshake"
    )
    log_format: Setting[str, str] = Setting("text", choice("text", "json"), "form of the log lines on stderr")
    log_level: Setting[str, str] = Setting(
        "INFO", choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", fold=str.upper), "least level that is logged"
    )
    allow_uid: Setting[int | Iterable[int | str], tuple[int, ...]] = Setting(
        (), uids(), "other users who may use the unix sockets; without any, the server's own user alone"
    )
    curve_secret_key: Setting[str | Path | None, Path | None] = Setting(
        None, file(), "certificate with the secret key of this server; with it, TCP takes only peers that know the key"
    )
    curve_authorized_keys: Setting[str | Path | None, Path | None] = Setting(
        None, directory(), "public certificates of those who may come in over TCP; without it, whoever knows the key"
    )
    insecure_bind: Setting[bool, bool] = Setting(
        False, switch(variable=True), "let TCP addresses that other machines reach be bound without keys"
    )
    checksum: Setting[bool, bool] = Setting(
        False, switch(variable=True), "check each chunk's bytes before a RETRIEVE is answered: a flipped bit is a miss"
    )
    tier: Setting[str | Iterable[str], tuple[str, ...]] = Setting(
        (),
        texts(TIER_RULE, tier_url, "URL", most=MOST_TIERS, show_each=without_password),
        "where chunks are kept behind the pool, in a directory or in Valkey",
    )
    tier_wait_seconds: Setting[float, float] = Setting(
        0.1, seconds(), "how long a LOOKUP waits for chunks that a tier has and the pool has not"
    )
    # Names of later builds: each is refused with a clear word instead of being unknown.
    pool_file: Setting[str | Path, str] = Setting("", later(), "")
    quota: Setting[str | Sequence[str], tuple[str, ...]] = Setting((), later(many=True), "")

    environ: InitVar[Mapping[str, str] | None] = None
    run_path: Path = field(init=False, compare=False)
    short_timeouts: bool = field(init=False, compare=False)
    _origins: Mapping[str, str] = field(init=False, compare=False)

    def __post_init__(self, environ: Mapping[str, str] | None) -> None:
        environ = os.environ if environ is None else environ
        object.__setattr__(self, "run_path", self.run_dir or _default_run_dir(environ))
        object.__setattr__(self, "short_timeouts", _short_timeouts_allowed(environ))
        object.__setattr__(self, "_origins", {})
        self._check_timeouts()
        self._check_paths()
        self._check_keys()
        if self.max_tokens < self.chunk_tokens:
            rule = f"at least chunk_tokens ({self.chunk_tokens})"
            raise refusal(settings_of(type(self))["max_tokens"], self.max_tokens, rule)

    def _check_paths(self) -> None:
        settings = settings_of(type(self))
        if not self.bind:
            try:
                unix_path(str(self.run_path / "router.sock"))
            except ValueError as error:
                rule = str(error) or "a path that may stand in ipc://"
                raise refusal(settings["run_dir"], str(self.run_path), rule) from None
        paths = [str(self.run_path / "lock")]
        paths += [
            url.removeprefix("ipc://") + suffix
            for url in self.bind
            if url.startswith("ipc://")
            for suffix in ("", *SUFFIXES)
        ]
        if len(set(paths)) < len(paths):
            rule = f"paths that do not meet each other's {' and '.join(SUFFIXES)}, or the run dir's lock"
            raise refusal(settings["bind"], self.bind, rule)

    def _check_keys(self) -> None:
        settings = settings_of(type(self))
        if self.curve_authorized_keys is not None and self.curve_secret_key is None:
            raise refusal(settings["curve_authorized_keys"], str(self.curve_authorized_keys), "with curve_secret_key")
        if self.curve_secret_key is None and not self.insecure_bind:
            for url in filter(is_reached_from_elsewhere, self.bind):
                raise refusal(settings["bind"], url, KEYLESS_RULE)

    def _check_timeouts(self) -> None:
        settings = settings_of(type(self))
        timeout = self.worker_reap_timeout_seconds
        if 0 < timeout < SHORTEST_REAP_TIMEOUT and not self.short_timeouts:
            rule = f"0 (silence reaps nobody) or at least {SHORTEST_REAP_TIMEOUT:g} seconds"
            raise refusal(settings["worker_reap_timeout_seconds"], timeout, rule)
        if self.worker_registration_grace_seconds < timeout:
            rule = f"at least worker_reap_timeout_seconds ({timeout:g})"
            raise refusal(settings["worker_registration_grace_seconds"], self.worker_registration_grace_seconds, rule)

    def __repr__(self) -> str:
        """Show what differs from the defaults."""
        changed = [
            f"{name}={setting.kind.show(getattr(self, name))!r}"
            for name, setting in settings_of(type(self)).items()
            if getattr(self, name) != setting.checked(setting.default)
        ]
        return f"ServerConfig({', '.join(changed)})"

    @property
    def bind_urls(self) -> tuple[str, ...]:
        """The addresses to bind, also where none were given."""
        return self.bind or (f"ipc://{self.run_path}/router.sock",)

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Host and port for HTTP; None where it is off."""
        return None if self.http == "off" else split_loopback(self.http)

    def refusal(self, name: str, rule: str) -> ConfigError:
        """Make the error of a setting whose value turns out to break a rule; the text names where it came from."""
        error = refusal(settings_of(type(self))[name], getattr(self, name), rule)
        try:
            with sources.Found(origins=dict(self._origins)).named_origins():
                raise error
        except ConfigError as named:
            return named

    @classmethod
    def from_args(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        prog: str = "python -m lmlive.server",
        warn: Callable[[str], object] = _log.warning,
    ) -> Self:
        """Build a config from flags, the environment and the file that ``--config`` names.

        ``--help`` and ``--version`` print and leave with status 0, as argparse does.

        Args:
            argv: The flags.
            environ: The environment; ``os.environ`` without.
            prog: The program's name in ``--help``.
            warn: Told of unknown variables, for a program whose log has no form before its settings are known.

        Raises:
            ConfigError: A flag is unknown, or a value breaks its rule; the text names where it came from.
        """
        environ = os.environ if environ is None else environ
        flags = sources.read_flags(settings_of(cls), argv, prog=prog)
        return cls._from(environ, flags, warn)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Build a config from ``LMLIVE_`` variables, and from the file that ``LMLIVE_CONFIG`` names.

        A variable that is unknown gets a warning in the log; an empty one counts as unset.

        Raises:
            ConfigError: A value breaks its rule.
        """
        return cls._from(os.environ if environ is None else environ, sources.Found(), _log.warning)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Build a config from a TOML file whose keys are the fields.

        Raises:
            ConfigError: The file cannot be read, a key is unknown, or a value breaks its rule.
        """
        found = sources.read_file(settings_of(cls), path)
        return cls._made(found, None)

    @classmethod
    def _from(cls, environ: Mapping[str, str], flags: sources.Found, warn: Callable[[str], object]) -> Self:
        variables = sources.read_environment(settings_of(cls), environ, warn)
        named = variables if flags.config is None else flags
        found = sources.Found()
        if named.config is not None:
            found = sources.read_file(settings_of(cls), named.config, named.config_origin)
        by_default = sources.Found(
            origins={name: f"{setting.flag} (default)" for name, setting in settings_of(cls).items()}
        )
        return cls._made(by_default.under(found).under(variables).under(flags), environ)

    @classmethod
    def _made(cls, found: sources.Found, environ: Mapping[str, str] | None) -> Self:
        with found.named_origins():
            config = cls(environ=environ, **found.values)
        object.__setattr__(config, "_origins", found.origins)
        return config


def _short_timeouts_allowed(environ: Mapping[str, str]) -> bool:
    text = environ.get(ALLOW_SHORT_TIMEOUTS, "")
    try:
        return bool(text) and parse_switch(text)
    except ValueError:
        message = f"{ALLOW_SHORT_TIMEOUTS} is {text!r} but must be {SWITCH_RULE}"
        raise ConfigError(message, field=ALLOW_SHORT_TIMEOUTS, value=text, rule=SWITCH_RULE) from None


def _default_run_dir(environ: Mapping[str, str]) -> Path:
    runtime_dir = environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime_dir) / "lmlive" if runtime_dir.startswith("/") else Path(f"/tmp/lmlive-{os.getuid()}")  # noqa: S108  # checked to be ours and private before it is used
