"""What a server's first bytes say, and the words for a refusal."""

import pytest

from lmlive.errors import RequestTimeout, ServerUnavailable
from lmlive.protocol.handshake import (
    GREETING_BYTES,
    GREETING_START,
    Refused,
    is_refusal,
    judge_greeting,
    refusal,
)


def greeting(mechanism: bytes) -> bytes:
    got = GREETING_START + b"\x01" + mechanism.ljust(20, b"\0") + bytes(32)
    assert len(got) == GREETING_BYTES
    return got


@pytest.mark.parametrize(
    ("got", "without", "with_keys"),
    [
        (greeting(b"NULL"), None, Refused.KEYS_UNKNOWN),
        (greeting(b"CURVE"), Refused.KEYS_WANTED, None),
        (greeting(b"PLAIN"), None, None),
        (greeting(b"\xff" * 20), None, None),
        (b"", None, None),
        (greeting(b"CURVE")[:63], None, None),
        (b"HTTP/1.1 400 Bad Request", Refused.OTHER_PROTOCOL, Refused.OTHER_PROTOCOL),
        (b"\x16\x03", Refused.OTHER_PROTOCOL, Refused.OTHER_PROTOCOL),
    ],
)
def test_a_greeting_says_whether_it_is_worth_trying(
    got: bytes, without: Refused | None, with_keys: Refused | None
) -> None:
    assert judge_greeting(got, keyed=False) is without
    assert judge_greeting(got, keyed=True) is with_keys


@pytest.mark.parametrize("reason", Refused)
def test_a_refusal_names_the_server_and_says_what_to_do(reason: Refused) -> None:
    error = refusal(reason, "tcp://host:1")
    assert error.fields == {"url": "tcp://host:1", "reason": reason.value}
    assert str(error).startswith("refused by tcp://host:1: ")
    assert is_refusal(error)


def test_what_is_no_refusal() -> None:
    assert not is_refusal(ServerUnavailable("nobody", url="tcp://host:1"))
    assert not is_refusal(RequestTimeout("late", reason="late"))
    assert not is_refusal(None)
