import inspect
import pickle

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive import errors
from lmlive.errors import InternalError, LMLiveError, RequestError, ServerBusy, from_wire, to_wire

# Numbers of the wire: never changed, never used again.
CODES = {
    "InternalError": 1,
    "LMLiveError": 2,
    "ProtocolError": 10,
    "VersionError": 11,
    "InvalidPayload": 12,
    "UnknownVerb": 13,
    "MessageTooLarge": 14,
    "RequestError": 20,
    "UnknownInstance": 21,
    "StaleGeneration": 22,
    "StaleEpoch": 23,
    "NotOwner": 24,
    "InvalidLayout": 25,
    "InvalidHandle": 26,
    "InvalidBlocks": 27,
    "UnknownLease": 28,
    "ServerBusy": 29,
    "ServerStarting": 30,
    "ServerDraining": 31,
    "TransportError": 40,
    "RequestTimeout": 41,
    "ServerUnavailable": 42,
    "WorkerClosed": 43,
    "ForkedProcess": 44,
    "DeviceError": 50,
    "HandleOpenError": 51,
    "HandleCloseError": 52,
    "ReleasePending": 53,
    "StartError": 60,
    "ConfigError": 70,
    "InvalidArgument": 71,
}
BASES = {
    "ConfigError": (LMLiveError, ValueError),
    "InvalidArgument": (LMLiveError, ValueError),
    "ProtocolError": (LMLiveError,),
    "RequestError": (LMLiveError,),
    "TransportError": (LMLiveError, ConnectionError),
    "RequestTimeout": (errors.TransportError, TimeoutError),
    "DeviceError": (LMLiveError,),
    "StartError": (LMLiveError,),
    "InternalError": (LMLiveError,),
}
CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, LMLiveError)
}

wire_values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary()
)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: name not in ("fields", "message", "code"))


def test_the_codes_are_the_wires() -> None:
    assert {name: cls.code for name, cls in CLASSES.items()} == CODES
    assert len(set(CODES.values())) == len(CODES)
    assert all(0 < code < 2**16 for code in CODES.values())


@pytest.mark.parametrize("name", BASES)
def test_the_tree(name: str) -> None:
    assert CLASSES[name].__bases__ == BASES[name]


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_error_says_what_it_is(cls: type[LMLiveError]) -> None:
    assert "code" in vars(cls)
    assert inspect.getdoc(cls)
    assert str(cls()) == cls.__name__
    error = cls("register again", generation=7)
    assert str(error) == error.message == "register again"
    assert error.generation == 7
    assert error.fields == {"generation": 7}
    with pytest.raises(AttributeError, match="no_such_field"):
        _ = error.no_such_field


@given(st.sampled_from(sorted(CLASSES)), st.text(max_size=100), st.dictionaries(names, wire_values, max_size=4))
def test_an_error_crosses_the_wire_intact(name: str, message: str, fields: dict[str, object]) -> None:
    code, text, plain = to_wire(CLASSES[name](message, **fields))
    sent = msgpack.unpackb(msgpack.packb([code, text, plain]))
    error = from_wire(*sent)
    assert type(error) is CLASSES[name]
    assert error.message == message
    assert error.fields == fields


@given(st.dictionaries(names, st.recursive(wire_values, st.lists, max_leaves=20) | st.sets(st.integers())))
def test_whatever_a_field_is_it_can_be_packed(fields: dict[str, object]) -> None:
    msgpack.packb(to_wire(ServerBusy("try again", thing=object(), large=2**70, **fields)))


def test_a_foreign_exception_keeps_its_text_to_itself() -> None:
    code, message, fields = to_wire(KeyError("the password"))
    assert code == InternalError.code
    assert "password" not in f"{message}{fields}"
    assert fields == {"type": "KeyError"}


def test_an_unknown_code_is_a_refusal() -> None:
    error = from_wire(4711, "from the future", {"hint": 1})
    assert type(error) is RequestError
    assert error.hint == 1


def test_an_error_can_be_copied() -> None:
    error = ServerBusy("try again", retry_after=0.1)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # as asyncio and executors may do with any exception
    assert (type(again), again.message, again.fields) == (ServerBusy, "try again", {"retry_after": 0.1})
