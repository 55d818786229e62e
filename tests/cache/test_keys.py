import hashlib
import os
import subprocess
import sys
from array import array
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlive.cache.keys import chunk_keys, salt_tag, split_keys
from lmlive.errors import InvalidArgument

# Made with printf and sha256sum: token ids, chunk_tokens, adapter, salt, keys.
GOLDEN = [
    ([0], 1, "", "", ["13373ad98e4c87cb960913f850d583ca35bc6dbcf5067bb3fa2bcb865f6a171a"]),
    (
        [1, 2, 3, 2**32 - 1],
        2,
        "",
        "",
        [
            "84ca00cef3732566e9b5e22ca438bcabb5eed9421f62576c817b954bc1bf42dc",
            "860bfb86c9721fe1f122e636ed0cd7e6b0d5289455bb5a4a43f122ecc8aaeb5a",
        ],
    ),
    ([1, 2], 2, "a", "", ["7b3371941765b48e0bf85657fea5ac38197657adaacc3a8a360061519c7c9cc3"]),
    ([1, 2], 2, "", "s", ["e017cdc7196747dfce0a83b2fd3b78fbdd569fccf7ee71b9111531ae66260ce1"]),
]


def by_the_book(token_ids: list[int], chunk_tokens: int, adapter: str, salt: str) -> list[bytes]:
    key = hashlib.sha256(b"lmlive/1" + msgpack.packb([adapter, salt])).digest()
    keys = []
    for start in range(0, len(token_ids) // chunk_tokens * chunk_tokens, chunk_tokens):
        chunk = b"".join(token.to_bytes(4, "little") for token in token_ids[start : start + chunk_tokens])
        key = hashlib.sha256(key + chunk).digest()
        keys.append(key)
    return keys


@pytest.mark.parametrize(("token_ids", "chunk_tokens", "adapter", "salt", "keys"), GOLDEN)
def test_golden_vectors(token_ids: list[int], chunk_tokens: int, adapter: str, salt: str, keys: list[str]) -> None:
    made = chunk_keys(token_ids, chunk_tokens=chunk_tokens, adapter=adapter, salt=salt)
    assert [key.hex() for key in made] == keys


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from lmlive.cache.keys import chunk_keys; print(chunk_keys([1, 2], chunk_tokens=2, adapter='a')[0].hex())"
    )
    for seed in ("0", "4242"):
        printed = subprocess.check_output(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        )
        assert printed.strip() == GOLDEN[2][4][0]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 9),
    st.text(max_size=5),
    st.text(max_size=5),
)
def test_keys_are_what_the_rule_says(token_ids: list[int], chunk_tokens: int, adapter: str, salt: str) -> None:
    keys = chunk_keys(token_ids, chunk_tokens=chunk_tokens, adapter=adapter, salt=salt)
    assert keys == by_the_book(token_ids, chunk_tokens, adapter, salt)
    assert keys == chunk_keys(tuple(token_ids), chunk_tokens=chunk_tokens, adapter=adapter, salt=salt)
    assert split_keys(b"".join(keys)) == keys
    assert split_keys(b"") == []
    zeros = [b"k" * 31 + b"\0", bytes(32)]
    assert split_keys(b"".join(zeros)) == zeros


@given(st.lists(st.integers(0, 100), min_size=8, max_size=8), st.integers(0, 7))
def test_a_key_stands_for_everything_before_it(token_ids: list[int], changed: int) -> None:
    other = list(token_ids)
    other[changed] += 1
    keys, others = chunk_keys(token_ids, chunk_tokens=2), chunk_keys(other, chunk_tokens=2)
    assert keys[: changed // 2] == others[: changed // 2]
    assert not set(keys[changed // 2 :]) & set(others[changed // 2 :])


@pytest.mark.parametrize(
    "same",
    [
        range(300),
        array("I", range(300)),
        np.arange(300),
        np.arange(300, dtype=np.int16),
        np.arange(600, dtype=np.int64)[::2] // 2,
        np.arange(300, dtype=">u4"),
        [np.int64(token) for token in range(300)],
        iter(range(300)),
    ],
)
def test_every_kind_of_sequence_gives_the_same_keys(same: Any) -> None:
    assert chunk_keys(same, chunk_tokens=256) == chunk_keys(list(range(300)), chunk_tokens=256)


def test_a_partial_chunk_has_no_key() -> None:
    assert chunk_keys(range(255), chunk_tokens=256) == []
    assert chunk_keys(np.zeros(0, dtype=np.int32), chunk_tokens=256) == []
    assert len(chunk_keys(range(2000), chunk_tokens=256)) == 7


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        [-1],
        [2**32],
        ["1"],
        [None],
        5,
        "12",
        b"1234",
        bytearray(4),
        np.array([1.5]),
        np.array([[1, 2]]),
        np.array([-1]),
        np.array([2**32]),
        np.array([True]),
    ],
)
def test_wrong_token_ids_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chunk_keys(wrong, chunk_tokens=1)
    assert caught.value.fields["field"] == "token_ids"


def test_token_ids_out_of_reach_are_refused() -> None:
    class OnAnotherDevice:
        dtype = "int64"

        def __array__(self, *_: object, **__: object) -> Any:
            raise TypeError("cannot convert a cuda tensor to numpy")

    with pytest.raises(InvalidArgument, match="CPU memory"):
        chunk_keys(OnAnotherDevice(), chunk_tokens=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_tokens", [0, -1, True, 2.0])
def test_wrong_chunk_tokens_are_refused(chunk_tokens: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chunk_keys([1], chunk_tokens=chunk_tokens)
    assert caught.value.fields["field"] == "chunk_tokens"


@pytest.mark.parametrize("text", [None, 1, b"a", "\ud800"])
def test_wrong_names_are_refused(text: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chunk_keys([1], chunk_tokens=1, adapter=text)
    assert caught.value.fields["field"] == "adapter"
    with pytest.raises(InvalidArgument) as caught:
        chunk_keys([1], chunk_tokens=1, salt=text)
    assert caught.value.fields["field"] == "salt"


def test_salt_tag() -> None:
    assert salt_tag("") == bytes(16)
    assert salt_tag("s").hex() == "043a718774c572bd8a25adbeb1bfcd5c"
    with pytest.raises(InvalidArgument):
        salt_tag("\ud800")
