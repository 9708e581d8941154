"""`python3 -m ops.bench.gpu`: the same as `minisgl bench gpu`, for a checkout or folder that nobody has installed."""

from __future__ import annotations

import os
import sys

from ops.bench.gpu import main
from pipeline.errors import ConfigError

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except ConfigError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        sys.exit(2)
