"""Chunks to be kept: bytes that are told apart, and names."""

import hashlib

import numpy as np

from lmlive.tier.base import Bytes

SIZE = 3 * (1 << 20) + 777


def chunk(seed: int, size: int = SIZE) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def name(seed: int) -> bytes:
    return hashlib.sha256(str(seed).encode()).digest()


def empty(size: int = SIZE) -> Bytes:
    return np.zeros(size, np.uint8)
