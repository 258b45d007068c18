"""Let the command `flwr` wait for its local SuperLink longer than 15 s, which busy machines exceed.

With this folder in PYTHONPATH, Python imports this file before a program begins.
"""

import sys
from pathlib import Path

if Path(sys.argv[0]).name == "flwr":
    from flwr.cli import constant

    constant.LOCAL_SUPERLINK_STARTUP_TIMEOUT = 600.0
