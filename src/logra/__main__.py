"""`python -m logra` is `logra`."""

import sys

from logra.cli.main import main

sys.exit(main())
