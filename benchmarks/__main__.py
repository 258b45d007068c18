"""Measure speed, memory and the quickstart's accuracies: `make bench`, or `python -m benchmarks`."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.records import new_record, write_record
from benchmarks.sections import SECTIONS, Sizes
from hyperfl_flwr.launch.app_bundle import commit

QUICK = Sizes(rounds=3, repetitions=2, is_quick=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure the sections, print the tables of each, and write its record."""
    names, sizes = _parsed(words)
    measured_commit = commit()  # before a record changes the checkout
    for name in names:
        section = SECTIONS[name]
        found = section.measure(sizes, _note)
        record = new_record(command_of(name, sizes), measured_commit, section.kind.dump_python(found, mode="json"))
        print("\n\n".join([f"## {name}", *section.tables(found), record.source()]), end="\n\n", flush=True)
        if not sizes.is_quick:
            _note(f"wrote {write_record(name, record)}; `make results` writes the pages")


def command_of(name: str, sizes: Sizes) -> str:
    """Return the command that repeats the measurement of a section."""
    options = " --quick" if sizes.is_quick else ""
    return f"python -m benchmarks {name}{options}" + "".join(
        f" --{option} {getattr(sizes, option)}" for option in SECTIONS[name].options
    )


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parsed(words: Sequence[str] | None) -> tuple[list[str], Sizes]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure speed and memory.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (default: all)")
    usual = Sizes()
    parser.add_argument(
        "--rounds", type=int, help=f"rounds of each federation, at least 3 (default: {usual.rounds}, quick: 3)"
    )
    parser.add_argument(
        "--repetitions", type=int, help=f"measurements for each median (default: {usual.repetitions}, quick: 2)"
    )
    parser.add_argument("--nodes", type=int, help=f"SuperNodes of deployed-load (default: {usual.nodes})")
    parser.add_argument("--data-root", default="", help="folder of Fashion-MNIST (default: your cache folder)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes; omits deployments and the quickstart, and writes no record (four minutes)",
    )
    options = parser.parse_args(words)
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"there is no section {unknown[0]}; choose from {', '.join(SECTIONS)}")
    base = QUICK if options.quick else usual
    sizes = Sizes(
        rounds=base.rounds if options.rounds is None else options.rounds,
        repetitions=base.repetitions if options.repetitions is None else options.repetitions,
        nodes=base.nodes if options.nodes is None else options.nodes,
        data_root=options.data_root,
        is_quick=options.quick,
    )
    for name, least in (("rounds", 3), ("repetitions", 1), ("nodes", 1)):
        if getattr(sizes, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(sizes, name)}")
    names = options.sections or list(SECTIONS)
    slow = [name for name in names if not SECTIONS[name].has_quick]
    if options.quick and options.sections and slow:
        parser.error(f"{slow[0]} has no quick version")
    return [name for name in names if not (options.quick and name in slow)], sizes


if __name__ == "__main__":
    main()
