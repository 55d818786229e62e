"""What comes before the protocol: ZeroMQ's greeting, and why a server lets nobody in who says the wrong thing there.

libzmq tells a refused side little, and often only that the connection ended. What it does not tell, the server's first
bytes do: each side says in its greeting whether it takes keys. The rule: whoever is refused learns why, in one
sentence that says what to do, and within the time of a few attempts.
"""

from enum import StrEnum
from typing import Final

from lmlive.errors import ServerUnavailable

GREETING_START: Final = b"\xff" + bytes(8) + b"\x7f\x03"
"""What a server answers with the whole of its own greeting."""
GREETING_BYTES: Final = 64
NULL: Final = "NULL"
CURVE: Final = "CURVE"

ENDED_MOST: Final = 3
"""How often in a row a server may end a handshake with keys before its key is taken for another one than ours."""


class Refused(StrEnum):
    """Why a server does not let us in; the field ``reason`` of the error."""

    KEYS_WANTED = "keys_wanted"
    KEYS_UNKNOWN = "keys_unknown"
    WRONG_SERVER_KEY = "wrong_server_key"
    NOT_AUTHORIZED = "not_authorized"
    OTHER_PROTOCOL = "other_protocol"


_SENTENCES: Final = {
    Refused.KEYS_WANTED: "it lets in only those with keys: give its public key (curve_server_key)",
    Refused.KEYS_UNKNOWN: "it has no keys: leave out curve_server_key, or start it with --curve-secret-key",
    Refused.WRONG_SERVER_KEY: "its key is not the one given as curve_server_key: give the public key of this server",
    Refused.NOT_AUTHORIZED: (
        "our key is not among those it knows: put our public certificate into its --curve-authorized-keys, and give "
        "the secret one as curve_secret_key"
    ),
    Refused.OTHER_PROTOCOL: "something else than a server of lmlive listens there: look at the address",
}


def refusal(reason: Refused, url: str) -> ServerUnavailable:
    """Make the error of a server that does not let us in; fields ``url`` and ``reason``."""
    return ServerUnavailable(f"refused by {url}: {_SENTENCES[reason]}", url=url, reason=reason.value)


def is_refusal(error: BaseException | None) -> bool:
    """Tell whether an error says that a server does not let us in, which no patience makes go away."""
    return isinstance(error, ServerUnavailable) and "reason" in error.fields


def judge_greeting(got: bytes, *, keyed: bool) -> Refused | None:
    """Tell from a server's first bytes whether it would never let us in; None where they do not say so."""
    if got and got[0] != GREETING_START[0]:
        return Refused.OTHER_PROTOCOL
    if len(got) < GREETING_BYTES:
        return None
    mechanism = got[12:32].rstrip(b"\0").decode("ascii", "replace")
    if keyed:
        return Refused.KEYS_UNKNOWN if mechanism == NULL else None
    return Refused.KEYS_WANTED if mechanism == CURVE else None
