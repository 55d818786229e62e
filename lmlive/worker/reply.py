"""How a request ended: with a reply, or without one.

Pure: bytes in, a ``Reply`` out; any thread. Whatever the server sent, reading it gives a ``Reply`` whose error is
typed; nothing is raised before somebody asks for the result.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lmlive.errors import LMLiveError, ProtocolError, VersionError
from lmlive.protocol import versions
from lmlive.protocol.codec import Header, decode_body
from lmlive.protocol.messages import parse_error


class Reply(NamedTuple):
    """The end of a request.

    Args:
        header: The reply's; None where none came.
        payload: The result; empty with an error.
        error: What went wrong; not raised yet.
        sent: False if the request never left this process.
        bulk: The frames behind it.
    """

    header: Header | None
    payload: list[object]
    error: LMLiveError | None
    sent: bool
    bulk: Sequence[bytes | memoryview] = ()

    def result(self) -> list[object]:
        """Give the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.payload


def unanswered(error: LMLiveError, *, sent: bool) -> Reply:
    """Make the end of a request without a reply."""
    return Reply(None, [], error, sent)


def read_reply(header: Header, frame: bytes, bulk: Sequence[bytes | memoryview] = ()) -> Reply:
    """Read the frame of a reply; what cannot be read is an error as well."""
    if not versions.SPOKEN.has(header.version) and header.code != VersionError.code:  # that one every version can read
        return Reply(header, [], versions.strange(header.version), sent=True)
    try:
        payload = decode_body(frame)
        if header.code == 0:
            return Reply(header, payload, None, sent=True, bulk=bulk)
        return Reply(header, [], parse_error(header.code, payload), sent=True)
    except ProtocolError as broken:
        return Reply(header, [], broken, sent=True)
