"""`python -m ss_executor`: see `cli`."""

import sys

from .cli import main

sys.exit(main())
