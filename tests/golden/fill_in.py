"""The command that adds fingerprints to records which lack them, where the code of their commits had the same results.

Run it from the project's root, in a checkout with its history, after a golden run has been added::

    python -m tests.golden.fill_in

For each commit that has run cells of `experiments/records`, it computes the golden runs whose fingerprints the records
lack, or have of other numbers, with that commit's code, and writes the fingerprints of those that agree with the stored
numbers. The other records stay out of date, and so do cells of uncommitted code and of unknown commits.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from experiments.golden import FILE, fingerprints
from experiments.records import Records, find_records, manifest_of, read_records, shipped_records
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.core.files.atomic_files import write_atomically

HERE = Path(__file__).parent

COMPUTE = """
import importlib.util, inspect, json, sys
if not importlib.util.find_spec("hyperfl_flwr.config.table"):  # earlier code has its functions elsewhere
    import hyperfl_flwr.config.run_config as run_config
    sys.modules["hyperfl_flwr.config.table"] = run_config
from runs import agree, computed, server_app
run_app = server_app.run
if "plots" not in inspect.signature(run_app).parameters:  # earlier code always draws
    server_app.run = lambda grid, config, plots: run_app(grid, config)
stored = json.loads(sys.argv[1])
found = {}
for name, run in stored["runs"].items():
    try:
        found[name] = agree(computed(name, stored["defaults"]), run["numbers"])
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
sys.__stdout__.write("\\n" + json.dumps(found))
"""


def lacking(records: Records) -> dict[str, dict[str, str]]:
    """Return the current fingerprints that the records of each commit lack, by the golden run's name."""
    found: dict[str, dict[str, str]] = {}
    for recorded in records.cells.values():
        golden, current = recorded.get("golden", {}), _current(recorded, records)
        for commit in commits(recorded):
            missing = {key: value for key, value in current.items() if golden.get(key) != value}
            found.setdefault(commit, {}).update(missing)
    return found


def commits(recorded: Mapping[str, Any]) -> set[str]:
    """Return the commits that have run a recorded cell; none if not all of its code is that of a commit."""
    manifest = recorded["manifest"]
    parts = [part["code"] for part in (manifest, *manifest["resumed"])]
    return {code["commit"] for code in parts} if all(code["commit"] and not code["dirty"] for code in parts) else set()


def _current(recorded: Mapping[str, Any], records: Records) -> dict[str, str]:
    return fingerprints(with_defaults(manifest_of(dict(recorded), records)["settings"]))


def agreeing(commit: str, names: set[str]) -> dict[str, Any]:
    """Return whether the code of a commit computes the stored numbers, or an error, for each name of a golden run."""
    stored = json.loads(FILE.read_text())
    stored["runs"] = {name: run for name, run in stored["runs"].items() if name in names}
    archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, HERE, HERE.parent)))}
        words = [sys.executable, "-P", "-c", COMPUTE, json.dumps(stored)]
        answer = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    found: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return found


def main() -> None:
    """Add the fingerprints, and print what each commit's code had."""
    found: dict[str, dict[str, Any]] = {}
    files = {name: read_records(find_records(name)) for name in shipped_records()}
    wanted: dict[str, set[str]] = {}
    for records in files.values():
        for commit, missing in lacking(records).items():
            wanted.setdefault(commit, set()).update(missing)
    for commit, names in wanted.items():
        found[commit] = agreeing(commit, names) if names else {}
        for name, answer in found[commit].items():
            sys.stdout.write(f"{commit[:12]}, {name}: {'the same' if answer is True else answer or 'others'}\n")
    for name, records in files.items():
        write_filled(find_records(name), records, found)


def write_filled(file: Path, records: Records, found: dict[str, dict[str, Any]]) -> None:
    """Write a file of records with the fingerprints of the golden runs that agree."""
    lines = []
    for text in file.read_text().splitlines():
        line = json.loads(text)
        if "row" in line:
            answers = [found.get(commit, {}) for commit in commits(line)]
            filled = {
                key: value
                for key, value in _current(line, records).items()
                if answers and all(answer.get(key) is True for answer in answers)
            }
            golden = {**line.get("golden", {}), **filled}
            line = {**{key: value for key, value in line.items() if key not in ("golden", "summary", "rounds")}}
            line |= {"golden": golden, **{key: json.loads(text)[key] for key in ("summary", "rounds")}}
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    write_atomically(file, "".join(lines).encode())


if __name__ == "__main__":
    main()
