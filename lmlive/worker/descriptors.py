"""Whether there are descriptors for what a worker opens.

libzmq ends the whole process, or waits for ever, where it lacks one in the midst of its own beginning: so they are
counted before. Any thread.
"""

import resource
from typing import Final

from lmlive.device.limits import descriptors_in_use
from lmlive.errors import ConfigError

ENTRY: Final = 32
"""What entering needs besides memory: 23 are opened (two connections, their threads, two loops, the tether)."""


def check_descriptors(memory: int = 0) -> None:
    """Refuse to enter where too few are left; other threads may take them all the same, a moment later.

    Args:
        memory: Descriptors for the memory that is shared.

    Raises:
        ConfigError: The limit of open files is too low.
    """
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_in_use() + ENTRY + memory
    if 0 <= allowed < needed:
        rule = f"at least {needed} (ulimit -n)"
        raise ConfigError(
            f"the limit of {allowed} open files leaves too few to connect with: raise it to {rule}",
            field="RLIMIT_NOFILE",
            value=allowed,
            rule=rule,
        )
