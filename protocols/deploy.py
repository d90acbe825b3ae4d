"""``python -m protocols.deploy``: the command ``ppvfl``."""

import sys

from protocols.cli import main

sys.exit(main())
