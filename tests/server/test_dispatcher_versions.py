"""A server that speaks versions 2 and 3, and peers that speak others: who is served, and who is told why not."""

import pytest

from lmlive.errors import LMLiveError, VersionError
from lmlive.protocol import versions
from lmlive.protocol.codec import Header, encode_request
from lmlive.protocol.verbs import Verb
from tests.modules.registry import BARE, SECRET
from tests.server.house import EPOCH, House


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(versions, "SPOKEN", versions.Versions(2, 3))
    return House()


def ask(house: House, verb: int, payload: list[object], version: int, **header: int) -> tuple[Header, object]:
    house.send(encode_request(verb, 11, payload, version=version, **header))
    return house.reply()


def hello(least: int, most: int) -> list[object]:
    return [least, most, 1, "test", SECRET]


@pytest.mark.parametrize(
    ("written_in", "peer", "chosen"), [(1, (1, 2), 2), (2, (2, 3), 3), (2, (2, 2), 2), (3, (3, 9), 3), (2, (1, 9), 3)]
)
async def test_a_hello_is_answered_in_its_own_version_and_names_the_best(
    house: House, written_in: int, peer: tuple[int, int], chosen: int
) -> None:
    header, body = ask(house, Verb.HELLO, hello(*peer), written_in)
    assert (header.code, header.version) == (0, written_in)
    assert isinstance(body, list)
    assert body[0] == chosen


@pytest.mark.parametrize(("written_in", "peer"), [(1, (1, 1)), (4, (4, 5)), (1, (2, 3)), (4, (2, 3)), (0, (0, 1))])
async def test_a_hello_without_a_common_version_is_refused_in_a_form_that_its_sender_reads(
    house: House, written_in: int, peer: tuple[int, int]
) -> None:
    header, error = ask(house, Verb.HELLO, hello(*peer), written_in)
    assert isinstance(error, VersionError)
    assert (error.server_min, error.server_max) == (2, 3)
    assert header.version == max(1, min(written_in, 3))
    assert len(house.books.connections) == 0


@pytest.mark.parametrize("version", [2, 3])
async def test_all_versions_of_the_server_are_served_at_a_time(house: House, version: int) -> None:
    asked: list[tuple[Verb, list[object]]] = [(Verb.PING, [None]), (Verb.STATUS, []), (Verb.EVENTS, [0, 1])]
    for verb, payload in asked:
        header, _ = ask(house, verb, payload, version)
        assert (header.code, header.version) == (0, version)
    header, error = ask(house, Verb.PING, [None, None], version)
    assert isinstance(error, LMLiveError)
    assert header.version == version


@pytest.mark.parametrize("version", [0, 1, 4, 255])
@pytest.mark.parametrize("verb", [Verb.PING, Verb.REGISTER, Verb.STORE, 99])
async def test_a_request_in_another_version_gets_its_one_error(house: House, version: int, verb: int) -> None:
    header, error = ask(house, verb, [None], version)
    assert isinstance(error, VersionError)
    assert (error.server_min, error.server_max, error.peer_min, error.peer_max) == (2, 3, version, version)
    assert header.version == max(1, min(version, 3))
    assert (header.request_id, header.epoch) == (11, EPOCH)
    assert house.dispatcher.outstanding == 0


async def test_a_legible_header_is_a_sign_of_life_in_whatever_version(house: House) -> None:
    house.registry.register(**BARE)
    house.registry.pass_time(1.0)
    ask(house, Verb.PING, [7], 4, epoch=EPOCH, instance_id=7, generation=1)
    assert house.silence() == 0.0
