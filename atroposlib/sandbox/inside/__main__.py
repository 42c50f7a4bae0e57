"""Started by its path: `python -I -S -B .../inside/__main__.py DESCRIPTOR`."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from inside.supervisor import main  # type: ignore[import-not-found]

main()
