"""``python -m kda_tl.cli``, the same as ``kda-tl``."""

import sys

from kda_tl.cli import main

if __name__ == "__main__":
    sys.exit(main())
