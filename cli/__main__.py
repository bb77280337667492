"""`python -m moa_spec.cli`, for launchers that start modules."""

import sys

from . import main

sys.exit(main())
