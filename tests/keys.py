"""Keys for tests: a server's, a welcome worker's, a stranger's, in files as an operator would have them."""

from pathlib import Path
from typing import Any

import zmq.auth

from lmlive.config.keys import Certificate, client_keys


class Keys:
    """Certificates of a server, a friend whose key is among the authorized ones, and a stranger whose key is not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.chmod(0o755)
        self.authorized = directory / "authorized"
        self.authorized.mkdir()
        for name in ("server", "friend", "stranger"):
            zmq.auth.create_certificates(directory, name)
            self.secret(name).chmod(0o600)
        self.welcome("friend")
        self._certificates = {name: self._read(name) for name in ("server", "friend", "stranger")}

    def public(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def secret(self, name: str) -> Path:
        return self.directory / f"{name}.key_secret"

    def welcome(self, name: str) -> None:
        (self.authorized / f"{name}.key").write_bytes(self.public(name).read_bytes())

    def send_away(self, name: str) -> None:
        (self.authorized / f"{name}.key").unlink()

    def certificate(self, name: str) -> Certificate:
        return self._certificates[name]

    def _read(self, name: str) -> Certificate:
        keys = client_keys(self.secret(name), self.public(name))
        assert keys is not None
        assert keys.own is not None
        return keys.own

    @property
    def at_the_server(self) -> dict[str, Any]:
        """Settings of a server with these keys."""
        return {"curve_secret_key": self.secret("server"), "curve_authorized_keys": self.authorized}

    def of(self, name: str, server: str = "server") -> dict[str, Any]:
        """Settings of a worker with these keys."""
        return {"curve_secret_key": self.secret(name), "curve_server_key": self.public(server)}

    def options(self, name: str, server: str = "server") -> dict[str, Any]:
        """Options of a bare ZeroMQ socket with these keys."""
        own = self.certificate(name)
        return {
            "curve_publickey": own.public,
            "curve_secretkey": own.secret or b"",
            "curve_serverkey": self.certificate(server).public,
        }
