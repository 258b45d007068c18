"""Check a method against the contract that all methods hold, on small federations in this process."""

import itertools
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hyperfl_flwr.app.methods import client_of, strategy_of
from hyperfl_flwr.app.resolved import resolved
from hyperfl_flwr.app.server import run
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import with_defaults
from hyperfl_flwr.contract.base import SMALL, ContractError, Federate, MakeGrid, require
from hyperfl_flwr.contract.faults import check_failures, check_processes, check_resume
from hyperfl_flwr.contract.grids import plain_grid
from hyperfl_flwr.contract.privacy import check_privacy
from hyperfl_flwr.contract.results import (
    check_repeatable,
    check_repeated_messages,
    check_results,
    check_sampling,
    check_seed,
    check_uploads,
)
from hyperfl_flwr.core.errors import ConfigError, HyperFLError, RunFailedError
from hyperfl_flwr.core.packages.package_finder import where
from hyperfl_flwr.core.packages.user_code import form_hint
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.core.settings import declared
from hyperfl_flwr.core.similar_names import nearest
from hyperfl_flwr.flower.log import FLOWER_LOGGER
from hyperfl_flwr.launch.findings import Finding, error, ok, warning
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.models.provenance import find_sources
from hyperfl_flwr.runs.failures import read_failures
from hyperfl_flwr.runs.run_directory import refuse_used_directory


@dataclass(frozen=True, kw_only=True)
class Check:
    """One part of the contract.

    Attributes:
        subject: What it is about, in a word or two.
        holds: Sentence for a method that holds it.
        check: Raises a ContractError, or any error of the method, unless the method holds it.
    """

    subject: str
    holds: str
    check: Callable[[str, Federate], None]


def check_settings(method: str, federate: Federate) -> None:
    """Every `auto` of the method's own settings becomes a number, which server and nodes compute alike."""
    config = RunConfig.from_flat(with_defaults({"method": method, "learning-rate": METHODS[method].learning_rate}))
    autos = {each.key for section in METHODS[method].settings for each in declared(section) if each.is_auto}
    missing = sorted(autos - strategy_of(method).automatic(config).keys())
    remedy = "return a number for each from the strategy's `automatic`"
    require(not missing, f"nothing replaces the `auto` of {', '.join(missing)}", remedy)
    require(resolved(config) == resolved(config), "`automatic` returns other numbers when it is called again", remedy)


CHECKS = (
    Check(subject="settings", holds="every `auto` becomes a number", check=check_settings),
    Check(subject="uploads", holds="the declaration names what leaves a client", check=check_uploads),
    Check(subject="results", holds="two rounds end with finite numbers and the declared groups", check=check_results),
    Check(subject="repeatability", holds="other nodes in another order give the same bits", check=check_repeatable),
    Check(subject="seed", holds="another seed gives another result", check=check_seed),
    Check(
        subject="repeated messages",
        holds="a message that arrives twice gets the same reply twice",
        check=check_repeated_messages,
    ),
    Check(subject="client sampling", holds="clients that are not sampled keep their state", check=check_sampling),
    Check(subject="failures", holds="clients that fail, one or all, are left out, and come back", check=check_failures),
    Check(subject="resume", holds="a killed run goes on in another process with the same bits", check=check_resume),
    Check(subject="processes", holds="nodes in processes of their own give the same bits", check=check_processes),
    Check(
        subject="privacy",
        holds="no message, log or checkpoint has 16 bytes of a private array",
        check=check_privacy,
    ),
)
"""The contract, in the order of the checks."""


def check_method(method: str, changes: Mapping[str, Scalar], output: Path | None = None) -> Iterator[Finding]:
    """Yield a finding for each part of the contract, on federations of five clients with 40 digits each.

    Args:
        method: Name of the method, built-in or `package.module:METHOD`.
        changes: Settings that differ from those of the small federations, such as the method's own sizes.
        output: Folder for the runs, new or empty; None to delete them.

    Raises:
        ConfigError: If the method cannot be imported, its declaration or a setting is wrong, or `changes` has settings
            that the checks choose themselves.
        RunDirectoryError: If `output` exists and is not an empty folder.
    """
    _refuse_chosen(changes)
    if output is not None:
        refuse_used_directory(output)
    find_sources({**changes, "method": method})
    if method not in METHODS:
        hint = nearest(method, METHODS) or form_hint("method", method, "METHOD")
        raise ConfigError(f"there is no method {method!r}{hint}; `hyperfl methods` lists all")
    RunConfig.from_flat(with_defaults({**SMALL, **changes, "method": method}))
    client_of(method), strategy_of(method)
    with tempfile.TemporaryDirectory(prefix="hyperfl-check-") as folder, _quiet():
        federate = federations(output or Path(folder), changes)
        for number, each in enumerate(CHECKS, 1):
            found = finding_of(each, method, federate)
            yield found
            if each.check is check_results and found.remedy == AGAIN:  # no run ends, so that the others say the same
                yield warning("other checks", f"{len(CHECKS) - number} were skipped, since no run ends", AGAIN)
                break
    if not client_of(method).private:
        yield warning(
            "private groups",
            "the client keeps nothing private, so that the server sees all that it trains",
            "name what must stay in `private`, or accept it, as FedAvg does",
        )


AGAIN = "correct this, and check the method again; --output DIR keeps the folders of the runs"
"""What to do about an error of the method itself, as opposed to a rule that it breaks."""

CHOSEN = ("output", "resume", "seed", "num-rounds", "num-clients", "fraction-train", "checkpoint-every", "method")
"""Settings that the checks choose themselves."""


def _refuse_chosen(changes: Mapping[str, Scalar]) -> None:
    if wrong := sorted(set(CHOSEN) & set(changes)):
        raise ConfigError(f"{', '.join(wrong)} cannot be set here: the checks choose them; leave them out")


def finding_of(check: Check, method: str, federate: Federate) -> Finding:
    """Return whether a method holds one part of the contract, as a finding."""
    try:
        check.check(method, federate)
    except ContractError as problem:
        return error(check.subject, problem.text, problem.remedy)
    except HyperFLError as problem:
        return error(check.subject, str(problem), AGAIN)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - the method's own
        traceback.print_exc()
        return error(check.subject, where(problem), AGAIN)
    return ok(check.subject, check.holds)


def federations(folder: Path, changes: Mapping[str, Scalar]) -> Federate:
    """Return a function that runs small federations in folders below one; see `base.Federate`."""
    numbers = itertools.count()

    def federate(
        method: str, num_nodes: int = 2, *, grid: MakeGrid = plain_grid, plots: bool = False, **given: Scalar
    ) -> Path:
        named = {key.replace("_", "-"): value for key, value in given.items()}
        output = folder / f"run-{next(numbers):03d}"
        settings = with_defaults({**SMALL, **changes, "method": method, "output": str(output), **named})
        try:
            return run(grid(num_nodes, settings), RunConfig.from_flat(settings), plots=plots)
        except RunFailedError as problem:
            raise _first_failure(output) or problem from None

    return federate


def _first_failure(run: Path) -> RunFailedError | None:
    """Return the first failure of a client as an error, with its details on stderr, if a run has such a failure."""
    for left_out in read_failures(run):
        sys.stderr.write(left_out.file.read_text(errors="replace").rstrip() + "\n")
        return RunFailedError(f"client {left_out.client} failed in round {left_out.round}: {left_out.reason}")
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the log of the runs, which is in their folders, from the terminal."""
    handlers, silent = list(FLOWER_LOGGER.handlers), logging.NullHandler()  # without any, Python would print it
    for handler in handlers:
        FLOWER_LOGGER.removeHandler(handler)
    FLOWER_LOGGER.addHandler(silent)
    try:
        yield
    finally:
        FLOWER_LOGGER.removeHandler(silent)
        for handler in handlers:
            FLOWER_LOGGER.addHandler(handler)
