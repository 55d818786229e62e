"""``python -m lmlive.cli``: the same as the ``lmlive`` command."""

import sys

from lmlive.cli.command import main

sys.exit(main())
