"""`python -m ss_convert.coreml.executor`: see `cli`."""

import sys

from .cli import main

sys.exit(main())
