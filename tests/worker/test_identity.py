from typing import Any

import pytest

from lmlive.errors import InvalidArgument
from lmlive.worker.identity import check_caches, check_identity, check_lease, check_url


@pytest.mark.parametrize("url", ["ipc:///run/x.sock", "tcp://127.0.0.1:5555", "tcp://[::1]:1"])
def test_good_urls(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        None,
        7,
        "",
        "ipc://",
        "http://x:1",
        "/run/x.sock",
        "tcp://host",
        "tcp://host:port",
        "tcp://host:0",
        "tcp://host:65536",
        "ipc:///" + 107 * "x",
    ],
)
def test_wrong_urls_are_told_at_once(url: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_url(url)
    assert caught.value.field == "url"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("model", (None, "", 0, 1)),
        ("model", ("x" * 5000, "", 0, 1)),
        ("model", ("\ud800", "", 0, 1)),
        ("revision", ("m", 3, 0, 1)),
        ("rank", ("m", "", 1, 1)),
        ("rank", ("m", "", -1, 1)),
        ("rank", ("m", "", True, 2)),
        ("world_size", ("m", "", 0, 0)),
        ("world_size", ("m", "", 0, 5000)),
        ("world_size", ("m", "", 0, 1.0)),
    ],
)
def test_wrong_identities_are_told_at_once(field: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_identity(*arguments)
    assert caught.value.field == field


def test_a_lease_is_text_or_none() -> None:
    assert check_lease(None) is None
    assert check_lease("abc") == "abc"
    with pytest.raises(InvalidArgument):
        check_lease(7)


def test_caches_are_a_dict_or_a_list_of_dicts() -> None:
    assert check_caches({}) == [{}]
    assert check_caches([]) == []
    assert check_caches([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("caches", [None, 7, "text", [1], {"a"}, object()])
def test_wrong_caches_are_told_at_once(caches: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_caches(caches)
    assert caught.value.field == "kv_caches"
