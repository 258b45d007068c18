"""The command that stores the golden numbers again, of the runs whose numbers have changed.

Run it from the project's root, only when results are MEANT to change, and give the reason in the commit's message::

    python -m tests.golden.regenerate

Records of studies that depend on a changed run are out of date from then on, until their cells are run again.
"""

import json
import sys
from pathlib import Path

from experiments.golden import FILE
from hyperfl_flwr.config.table import default_settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]  # for `runs` and `own_networks`

from runs import COMMON, RUNS, agree, computed  # noqa: E402 - after the path


def main() -> None:
    """Store the numbers that the current code computes, where they do not agree with the stored ones."""
    before = json.loads(FILE.read_text()) if FILE.is_file() else {"defaults": {}, "runs": {}}
    known = {key: value for key, value in default_settings().items() if key not in COMMON}
    defaults = {**known, **{key: value for key, value in before["defaults"].items() if key in known}}
    runs = {}
    for name, golden in RUNS.items():
        found = computed(name, defaults)
        stored = before["runs"].get(name, {}).get("numbers", {})
        if not agree(found, stored):
            sys.stdout.write(f"{name}\n")
            stored = found
        runs[name] = {"where": golden.where, "numbers": stored}
    lines = [f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items()]
    text = ",\n".join(f"    {line}" for line in lines)
    FILE.write_text(f'{{\n  "defaults": {json.dumps(defaults)},\n  "runs": {{\n{text}\n  }}\n}}\n')


if __name__ == "__main__":
    main()
