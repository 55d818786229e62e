"""Values that no verb expects, mostly."""

import random


def anything(rng: random.Random, depth: int = 0) -> object:
    """Make a value that no verb expects, mostly."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return rng.choice([0, 1, -1, 7, 2**31, 2**63 - 1, 2**64 - 1, True, None, 1.5])
    if kind == 1:
        return rng.randbytes(rng.choice([0, 1, 16, 31, 32, 33, 64]))
    if kind == 2:
        return rng.choice(["", "m", "\0", "x" * 5000, "é", "server_driven", "fd", "float32"])
    if kind == 3:
        return rng.randrange(1000)
    return [anything(rng, depth + 1) for _ in range(rng.randrange(5))]


def spoil(rng: random.Random, payload: list[object]) -> list[object]:
    """Replace a part of a payload, or a part of a part."""
    spoilt = list(payload)
    if spoilt:
        at = rng.randrange(len(spoilt))
        part = spoilt[at]
        spoilt[at] = spoil(rng, part) if isinstance(part, list) and part and rng.random() < 0.7 else anything(rng)
    return spoilt
