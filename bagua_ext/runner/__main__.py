"""``python -m bagua_ext.runner`` is ``bagua-run``."""

import sys

from bagua_ext.runner import main_entry

sys.exit(main_entry())
