"""``python -m protocols.deploy``: the command ``ppvfl``."""

import sys

from protocols.deploy.cli import main

sys.exit(main())
