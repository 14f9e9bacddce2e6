"""``python -m stratad.ctl``: stratactl without an installed script."""

import sys

from stratad.ctl.main import main

sys.exit(main())
