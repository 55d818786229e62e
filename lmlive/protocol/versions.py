"""Which versions of the wire this build speaks, and how two sides that speak several agree on one.

What never changes, in any version, is what two sides need to find that out: the header, HELLO and its reply, and the
form of an error. The rules: a peer writes HELLO in the lowest version that it speaks, and everything after it in the
one that the reply names, which is the highest that both speak; every frame says its own version; a server answers each
request in the request's version, and one in a version that it does not speak with a ``VersionError`` that its sender
can read.

Pure: any thread. ``SPOKEN`` is read where it is needed and kept nowhere, so that a test can widen it.
"""

from typing import Final, NamedTuple

from lmlive.errors import LMLiveError, VersionError

FIRST: Final = 1
"""The version before which there was none."""


class Versions(NamedTuple):
    """A range of wire versions, both ends included; empty where they are crossed."""

    least: int
    most: int

    def __str__(self) -> str:
        """Give it in words."""
        return f"{self.least} to {self.most}"

    def has(self, version: int) -> bool:
        """Tell whether a version is within the range."""
        return self.least <= version <= self.most


SPOKEN = Versions(1, 1)
"""What this build reads and writes."""


def negotiate(peer: Versions) -> int:
    """Choose the highest version that both sides speak.

    Raises:
        VersionError: There is none; its fields name both ranges.
    """
    version = min(SPOKEN.most, peer.most)
    if version < max(SPOKEN.least, peer.least):
        raise no_common(peer)
    return version


def agree(written_in: int, peer: Versions) -> int:
    """Choose the version to speak with whoever said HELLO.

    Args:
        written_in: The version of the HELLO itself, which may be one that we do not speak.
        peer: What it says that its sender speaks.

    Raises:
        VersionError: There is none in common, or the HELLO is in another version than the lowest of its sender.
    """
    version = negotiate(peer)
    if not SPOKEN.has(written_in) and written_in != peer.least:
        raise no_common(Versions(written_in, written_in))
    return version


def check_request(version: int) -> None:
    """Refuse a request that is in no version of ours.

    Raises:
        VersionError: Its fields name both ranges, as far as the peer's is known.
    """
    if not SPOKEN.has(version):
        raise no_common(Versions(version, version))


def blame(version: int, error: LMLiveError) -> LMLiveError:
    """Give the error for a request that does not read as one: its version's, where we do not speak that."""
    return error if SPOKEN.has(version) else no_common(Versions(version, version))


def no_common(peer: Versions) -> VersionError:
    """Make the error of a server for a peer that it has no version in common with."""
    return VersionError(
        f"no common wire version: this side speaks {SPOKEN}, the peer {peer}: upgrade the older side",
        server_min=SPOKEN.least,
        server_max=SPOKEN.most,
        peer_min=peer.least,
        peer_max=peer.most,
    )


def answer_in(version: int) -> int:
    """Give the version in which a request of some version is answered.

    It is the request's own, also where that is older than all we speak: its sender knows no other. Of a newer one
    nothing is known but that its error has the form of all errors, so that is written in our newest.
    """
    return max(FIRST, min(version, SPOKEN.most))


def check_told(version: int) -> int:
    """Give the version that a server says it speaks to us from now on.

    Raises:
        VersionError: We do not, so it does not keep the rule.
    """
    if not SPOKEN.has(version):
        raise strange(version)
    return version


def strange(version: int) -> VersionError:
    """Make the error for a reply in a version that we do not speak."""
    return VersionError(
        f"the server speaks wire version {version}, this side {SPOKEN}: upgrade the older side",
        server_min=version,
        server_max=version,
        peer_min=SPOKEN.least,
        peer_max=SPOKEN.most,
    )
