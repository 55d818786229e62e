"""Every exception of lmlive, and the numbers under which they cross the wire.

::

    LMLiveError                          catch this at the edge of your program
    ├── ConfigError(ValueError)          a setting breaks its rule: field, value, rule
    ├── InvalidArgument(ValueError)      a call was made with wrong arguments
    ├── ProtocolError                    these bytes are not a message
    │   ├── VersionError                 no common wire version: both ranges
    │   ├── InvalidPayload               a legible header with a body that breaks its verb's rule
    │   ├── UnknownVerb                  a verb number this build does not serve
    │   └── MessageTooLarge              size and limit
    ├── RequestError                     understood, and refused
    │   ├── UnknownInstance              never registered, reaped, or its secret was ended: register again
    │   ├── StaleGeneration              the instance has another generation now: register again
    │   ├── StaleEpoch                   another server answers, or this connection sent no HELLO
    │   ├── NotOwner                     another secret owns this instance id, or this uid is refused
    │   ├── InvalidLayout                tensor and field that cannot be served
    │   ├── InvalidHandle                memory that is missing, too small, or not sealed
    │   ├── InvalidBlocks                block ids outside the layout, or a wrong number of them
    │   ├── UnknownLease                 the lease ended or never was
    │   ├── ServerBusy                   a limit is reached: retry_after seconds
    │   ├── ServerStarting               the pool is not ready yet
    │   └── ServerDraining               the server is going away
    ├── TransportError(ConnectionError)
    │   ├── RequestTimeout(TimeoutError) no answer before the deadline
    │   ├── ServerUnavailable            nobody serves at this address
    │   ├── WorkerClosed                 this worker or scheduler was closed
    │   └── ForkedProcess                a forked child must make its own worker
    ├── DeviceError
    │   ├── HandleOpenError              a handle that could not be mapped
    │   ├── HandleCloseError             mappings that could not be closed
    │   └── ReleasePending               the memory is not released yet: keep it
    ├── StartError                       the server could not start
    └── InternalError                    a rule of ours is broken: please report it

An error carries fields; they are keyword arguments of the constructor and attributes of the object.
``code`` is the status byte of a reply; numbers are never reused.
"""

from typing import Any, ClassVar

_WIRE_SCALARS = (str, bytes, bool, int, float, type(None))
_MAX_TEXT = 4096


class LMLiveError(Exception):
    """Base of all errors of lmlive.

    Args:
        message: One sentence, lower case, that says what to do next.
        **fields: Facts about the failure; readable as ``error.fields`` and as attributes.
    """

    code: ClassVar[int] = 2

    def __init__(self, message: str = "", /, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        """Give a field as an attribute."""
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        detail = f"{type(self).__name__!r} has no attribute or field {name!r}"
        raise AttributeError(detail)

    def __str__(self) -> str:
        """Give the message, or the class name where there is none."""
        return self.message or type(self).__name__


class ConfigError(LMLiveError, ValueError):
    """A setting breaks its rule; fields ``field``, ``value``, ``rule``."""

    code = 70


class InvalidArgument(LMLiveError, ValueError):
    """A call was made with wrong arguments; nothing was sent."""

    code = 71


class ProtocolError(LMLiveError):
    """These bytes are not a message of this protocol."""

    code = 10


class VersionError(ProtocolError):
    """No common wire version; fields name both sides' ranges."""

    code = 11


class InvalidPayload(ProtocolError):
    """A legible header whose body breaks the rule of its verb."""

    code = 12


class UnknownVerb(ProtocolError):
    """A verb number that this build does not serve; field ``verb``."""

    code = 13


class MessageTooLarge(ProtocolError):
    """A message over the limit; fields ``size`` and ``limit``."""

    code = 14


class RequestError(LMLiveError):
    """A request that was understood and refused."""

    code = 20


class UnknownInstance(RequestError):
    """The instance is not registered (never was, reaped, or unregistered): register again."""

    code = 21


class StaleGeneration(RequestError):
    """The instance is registered under another generation; field ``generation``: register again."""

    code = 22


class StaleEpoch(RequestError):
    """Another server's epoch, or no HELLO on this connection (field ``hello``): say HELLO and register again."""

    code = 23


class NotOwner(RequestError):
    """Another secret owns this instance id, or the server refuses this uid."""

    code = 24


class InvalidLayout(RequestError):
    """A tensor that cannot be served; fields ``tensor`` and ``field``."""

    code = 25


class InvalidHandle(RequestError):
    """A handle that is missing, too small for its layout, or not safe to map."""

    code = 26


class InvalidBlocks(RequestError):
    """Block ids outside the layout, or a wrong number of them."""

    code = 27


class UnknownLease(RequestError):
    """The lease ended or never was."""

    code = 28


class ServerBusy(RequestError):
    """A limit is reached; field ``retry_after`` in seconds."""

    code = 29


class ServerStarting(RequestError):
    """The server is not ready yet; field ``retry_after`` in seconds."""

    code = 30


class ServerDraining(RequestError):
    """The server ends what runs and takes nothing new."""

    code = 31


class TransportError(LMLiveError, ConnectionError):
    """The request or its answer did not get through."""

    code = 40


class RequestTimeout(TransportError, TimeoutError):
    """No answer before the deadline, or the deadline was past before the request's turn came."""

    code = 41


class ServerUnavailable(TransportError):
    """Nobody serves at this address."""

    code = 42


class WorkerClosed(TransportError):
    """This worker or scheduler was closed."""

    code = 43


class ForkedProcess(TransportError):
    """Called in a forked child of the process that made it: make a new one there."""

    code = 44


class DeviceError(LMLiveError):
    """Device memory could not be handled."""

    code = 50


class HandleOpenError(DeviceError):
    """A handle could not be mapped."""

    code = 51


class HandleCloseError(DeviceError):
    """Mappings could not be closed; field ``failures`` lists them."""

    code = 52


class ReleasePending(DeviceError):
    """The memory is not released yet: keep it until a later answer or until the server's exit."""

    code = 53


class StartError(LMLiveError):
    """The server could not start."""

    code = 60


class InternalError(LMLiveError):
    """A rule of lmlive's own is broken: please report it."""

    code = 1


def _all_errors(root: type[LMLiveError]) -> list[type[LMLiveError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _all_errors(child))]


BY_CODE: dict[int, type[LMLiveError]] = {error.code: error for error in _all_errors(LMLiveError)}


def to_wire(error: BaseException) -> tuple[int, str, dict[str, object]]:
    """Reduce an error to (code, message, fields) for a reply.

    A foreign exception becomes an ``InternalError`` that names its type; its text may say what the caller must not
    see, so it stays in the server's log.
    """
    if not isinstance(error, LMLiveError):
        message = "the server failed on this request, see its log"
        return InternalError.code, message, {"type": type(error).__name__}
    return error.code, error.message[:_MAX_TEXT], {name: _scalar(value) for name, value in error.fields.items()}


def from_wire(code: int, message: str, fields: dict[str, object]) -> LMLiveError:
    """Build the error that the server raised; an unknown code becomes a RequestError with field ``status``."""
    error = BY_CODE.get(code)
    if error is None:
        return RequestError(message, **{**fields, "status": code})
    return error(message, **fields)


def _scalar(value: object) -> object:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_scalar(item) for item in list(value)[:64]]
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, _WIRE_SCALARS):
        return value[:_MAX_TEXT] if isinstance(value, (str, bytes)) else value
    return str(value)[:_MAX_TEXT]
