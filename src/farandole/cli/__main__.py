"""`python -m farandole.cli`."""

import sys

from farandole.cli import main

sys.exit(main())
