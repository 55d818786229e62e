"""How two sides find the version that they speak, whatever each of them speaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.errors import VersionError
from lmlive.protocol import codec, versions
from lmlive.protocol.codec import decode_header, encode_error, encode_pong, encode_reply, encode_request
from lmlive.protocol.versions import Versions, agree, answer_in, check_request, check_told, negotiate

numbers = st.integers(0, 255)
ranges = st.builds(Versions, numbers, numbers)


@pytest.fixture
def speaks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Versions:
    spoken = Versions(*request.param)
    monkeypatch.setattr(versions, "SPOKEN", spoken)
    return spoken


def test_there_is_one_version() -> None:
    assert versions.SPOKEN == (1, 1)
    assert versions.FIRST == codec.VERSION == 1


@pytest.mark.parametrize(
    ("speaks", "peer", "chosen"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 1), (0, 255), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((1, 2), (2, 3), 2),
        ((2, 3), (1, 2), 2),
        ((2, 3), (1, 9), 3),
    ],
    indirect=["speaks"],
)
def test_the_highest_common_version_is_taken(speaks: Versions, peer: tuple[int, int], chosen: int) -> None:
    assert negotiate(Versions(*peer)) == chosen
    assert agree(peer[0], Versions(*peer)) == chosen


@pytest.mark.parametrize(
    ("speaks", "peer"),
    [((1, 1), (2, 5)), ((1, 1), (0, 0)), ((1, 1), (5, 1)), ((2, 3), (1, 1)), ((1, 2), (3, 4))],
    indirect=["speaks"],
)
def test_without_a_common_version_both_ranges_are_named(speaks: Versions, peer: tuple[int, int]) -> None:
    with pytest.raises(VersionError) as caught:
        negotiate(Versions(*peer))
    least, most = peer
    ours = {"server_min": speaks.least, "server_max": speaks.most}
    assert caught.value.fields == ours | {"peer_min": least, "peer_max": most}
    assert f"{least} to {most}" in str(caught.value)
    assert f"{speaks.least} to {speaks.most}" in str(caught.value)


@given(ours=ranges, peer=ranges)
def test_what_is_chosen_is_the_best_that_both_speak(ours: Versions, peer: Versions) -> None:
    common = {version for version in range(256) if ours.has(version) and peer.has(version)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "SPOKEN", ours)
        if common:
            assert negotiate(peer) == max(common)
        else:
            with pytest.raises(VersionError):
                negotiate(peer)


@given(least=st.integers(1, 255), most=st.integers(1, 255), asked=numbers)
def test_an_answer_is_in_the_requests_version_or_in_one_that_its_sender_may_read(
    least: int, most: int, asked: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "SPOKEN", Versions(min(least, most), max(least, most)))
        answered = answer_in(asked)
        assert 1 <= answered <= max(least, most)
        assert answered == asked or asked > max(least, most) or asked == 0


@pytest.mark.parametrize("speaks", [(2, 3)], indirect=True)
def test_a_hello_is_read_in_the_lowest_version_of_its_sender(speaks: Versions) -> None:
    assert agree(1, Versions(1, 2)) == 2
    for contradiction in (1, 4):
        with pytest.raises(VersionError) as caught:
            agree(contradiction, Versions(2, 4))
        assert (caught.value.peer_min, caught.value.peer_max) == (contradiction, contradiction)


@pytest.mark.parametrize("speaks", [(2, 3)], indirect=True)
def test_a_request_of_another_version_is_refused(speaks: Versions) -> None:
    check_request(2)
    check_request(3)
    for version in (0, 1, 4, 255):
        with pytest.raises(VersionError) as caught:
            check_request(version)
        assert (caught.value.server_min, caught.value.server_max, caught.value.peer_min) == (2, 3, version)


def test_a_server_that_names_a_version_that_was_not_offered_is_refused() -> None:
    assert check_told(1) == 1
    with pytest.raises(VersionError) as caught:
        check_told(2)
    assert (caught.value.server_max, caught.value.peer_max) == (2, 1)


def test_every_frame_says_its_version_in_the_same_place() -> None:
    frames = [
        encode_request(2, 1, [None], version=7),
        encode_reply(1, 2, 3, 4, [True], version=7),
        encode_pong(1, 2, 3, 4, 7),
        encode_error(1, 2, 3, 4, VersionError("upgrade"), version=7),
    ]
    assert [decode_header(frame).version for frame in frames] == [7] * 4
    assert {frame[4] for frame in frames} == {7}
    assert encode_request(2, 1, [None], version=7)[5:] == encode_request(2, 1, [None])[5:]
