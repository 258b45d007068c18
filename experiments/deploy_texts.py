"""The texts of a deployment's files: scripts, units, settings. `@NAME@` stands for what `fill` puts in.

FLWR_SUPEREXEC_TASK_POLL_INTERVAL is left at Flower's second on purpose. A task is claimed once and gets one process,
whatever the interval; but at 0.1 s the SuperExec of an idle node was seen to use 3 % of a core for as long as it waits,
which is days, and what it saves is less than a second beside the three of Flower's other polls. Processes of earlier
messages that `ps` shows as defunct are normal: Flower waits for one only when it starts the next.
"""

import re

_NAME = "@([A-Z]+)@"

_PREAMBLE = """\
#!/bin/sh
# @WHAT@ Written by `hyperfl deploy init`; `environment` beside it is for your changes.
set -eu
umask 077
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd -P)
if [ -f "$here/environment" ]; then . "$here/environment"; fi
PATH="${HYPERFL_BIN:+$HYPERFL_BIN:}$PATH"
FLWR_HOME="$here/flwr"
FLWR_TELEMETRY_ENABLED=0
FLWR_DISABLE_UPDATE_CHECK=1
FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export PATH FLWR_HOME FLWR_TELEMETRY_ENABLED FLWR_DISABLE_UPDATE_CHECK FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION
if ! command -v @PROGRAM@ >/dev/null; then
    echo "error: @PROGRAM@ is not found; install hyperfl-flwr on this machine, and if it is not in PATH name the" >&2
    echo "folder of its programs as HYPERFL_BIN in $here/environment" >&2
    exit 2
fi
cd "$here"
"""

SERVER_START = (
    _PREAMBLE.replace("@WHAT@", "Starts the SuperLink.").replace("@PROGRAM@", "flower-superlink")
    + """\
if command -v hyperfl >/dev/null; then hyperfl deploy start-warnings || true; fi
exec flower-superlink --host "${HYPERFL_BIND:-@BIND@}" --port @PORT@ \\
    --ssl-ca-certfile "$here/ca.crt" --ssl-certfile "$here/server.crt" --ssl-keyfile "$here/server.key" \\
    --enable-supernode-auth --disable-runtime-dependency-installation \\
    --database "$here/state.db" "$@"
"""
)

NODE_START = (
    _PREAMBLE.replace("@WHAT@", "Starts the SuperNode of node @NUMBER@.").replace("@PROGRAM@", "flower-supernode")
    + """\
# What node.toml says, checked, as arguments that are quoted for the shell:
# --superlink ... --port ... --node-config '...'
# It comes when the SuperLink takes this node: one that was killed must have been missed before, a minute at most.
arguments=$(hyperfl deploy node-arguments "$here")
eval "set -- $arguments \\"\\$@\\""
exec flower-supernode \\
    --root-certificates "$here/ca.crt" --auth-supernode-private-key "$here/node.key" "$@"
"""
)

ENVIRONMENT = """\
# Read by start.sh. The folder with the programs `hyperfl` and `@PROGRAM@`, if it is not in PATH:
@BIN@
# Your network's way out, and other variables, each with `export`:
# export HTTPS_PROXY=http://proxy.example.org:3128
"""

CONNECTION = """\
[superlink]
default = "hyperfl"

[superlink.hyperfl]
address = "127.0.0.1:@PORT@"
root-certificates = "@CERTIFICATE@"
"""

NODE_SETTINGS = """\
# What this node's owner decides; the server cannot change it. Paths that do not begin with / are looked up beside this
# file. Read at each start; `hyperfl deploy check .` tells what is wrong.

# The data: "npz:FILE", "folder:FOLDER" (a folder of images for each class), or the name of a data set of
# `hyperfl datasets`, of which this node gets its share. Empty: the data set that the server names, for a first try.
data = ""

# Where named data sets lie; empty: your cache folder.
data-root = ""

# "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:NUMBER"
device = "auto"

# Threads of the processor for training, or "auto": all cores.
threads = "auto"

# Where the private part of the clients' models is kept. It never leaves this machine; keep the folder, for a run that
# goes on needs it.
state-dir = "state"

# Whether each client's model is kept in state-dir for `hyperfl export`.
keep-model = true

# The largest message that is taken from the server, in megabytes; 0: any.
max-message-mb = 0

# For runs with priv-hfl.mixing: a file that all nodes share and the server does not have.
mixing-key-file = ""

# A node that was never trained and takes a model on demand names its unlabelled data, the folder for what it gets, and
# if wanted a differential privacy of what it tells.
novel-data = ""
novel-output = ""
# novel-epsilon = 10.0
# novel-delta = 1e-5
"""

_CONFINED = """\
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes"""

SERVER_UNIT = """\
# systemd: sudo cp hyperfl-superlink.service /etc/systemd/system/ && sudo systemctl enable --now hyperfl-superlink
[Unit]
Description=HyperFL SuperLink
After=network-online.target
Wants=network-online.target

[Service]
User=@USER@
ExecStart=/bin/sh "@FOLDER@/start.sh"
Restart=on-failure
RestartSec=5
SuccessExitStatus=143
@CONFINED@
# The folders of the runs must stay writable: that is why not `strict`.
ProtectSystem=full

[Install]
WantedBy=multi-user.target
""".replace("@CONFINED@", _CONFINED)

NODE_UNIT = """\
# systemd: put this node's folder at @FOLDER@, owned by the user below (or change both), then
# sudo cp hyperfl-node.service /etc/systemd/system/ && sudo systemctl enable --now hyperfl-node
[Unit]
Description=HyperFL SuperNode @NUMBER@
After=network-online.target
Wants=network-online.target

[Service]
User=hyperfl
ExecStart=/bin/sh "@FOLDER@/start.sh"
Restart=always
RestartSec=20
@CONFINED@
ProtectSystem=strict
# Add the folder of state-dir or novel-output here if you move it out; data are only read.
ReadWritePaths="@FOLDER@"

[Install]
WantedBy=multi-user.target
""".replace("@CONFINED@", _CONFINED)


def fill(text: str, **values: object) -> str:
    """Put values in the place of `@NAME@`; what they hold is left as it is.

    Raises:
        ValueError: If there is no value for a name, or no name for a value.
    """
    names = set(re.findall(_NAME, text))
    if names != {name.upper() for name in values}:
        raise ValueError(f"the names are {sorted(names)}, the values are of {sorted(values)}")
    return re.sub(_NAME, lambda match: str(values[match[1].lower()]), text)
