"""``python -m bagua_ext.bench`` is ``bagua-bench``."""

import sys

from bagua_ext.bench import main_entry

if __name__ == "__main__":
    sys.exit(main_entry())
