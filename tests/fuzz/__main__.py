"""``python -m tests.fuzz --frames N --seed S``: fuzz a server, its tether, the workers' side and the codec.

Prints one JSON document; ends with 1 where something was found, with what makes it happen again: the seed and the
messages' numbers, for ``--only``.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.drive import fuzz_and_shrink
from tests.fuzz.parsing import parse_many
from tests.fuzz.workers import fuzz_workers


async def run(options: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    """Run all parts, or only some messages."""
    numbers = [int(number) for number in options.only.split(",")] if options.only else range(options.frames)
    found: dict[str, Any] = {"seed": options.seed}
    tethers = 0 if options.only else options.frames // 50
    found["server"] = await fuzz_and_shrink(run_dir, options.seed, numbers, tethers=tethers, said=_say)
    if not options.only:
        found["workers"] = await fuzz_workers(run_dir / "workers", options.seed, options.frames // 100)
        found["codec"] = parse_many(options.seed, options.frames)
    return found


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> int:
    """Run it as a command."""
    parser = argparse.ArgumentParser(description="Fuzz a server, its tether, the workers' side and the codec.")
    parser.add_argument("--frames", type=int, default=1_000_000, help="messages to the server (1000000)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="makes the same messages again")
    parser.add_argument("--only", default="", help="numbers of messages, to send these alone")
    options = parser.parse_args()
    _say(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="lmlive-") as run_dir:
        found = asyncio.run(run(options, Path(run_dir)))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return int(any("finding" in part for part in found.values() if isinstance(part, dict)))


if __name__ == "__main__":
    sys.exit(main())
