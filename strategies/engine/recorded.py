"""A strategy that wraps another one to write records and checkpoints, resume runs, and stop hopeless ones.

Flower has no hooks for these, and considers a run completed in which every client failed.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.core.tasks import TASKS
from hyperfl_flwr.protocol.arrays import num_elements
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.runs import manifest
from hyperfl_flwr.runs.checkpoint import SERVER, Checkpoints
from hyperfl_flwr.runs.failures import run_failed
from hyperfl_flwr.runs.planned_privacy import planned
from hyperfl_flwr.runs.run_directory import RunDirectory, read_manifest
from hyperfl_flwr.runs.validation import is_over, note_means, over_text
from hyperfl_flwr.server.exchange import exchange
from hyperfl_flwr.server.federation import Federation
from hyperfl_flwr.server.roster import Roster
from strategies.engine.base import BaseStrategy
from strategies.engine.observations import forget_observations
from strategies.engine.round_records import (
    aggregate_records,
    asked,
    costs_text,
    kept_records,
    mean_text,
    nodes_text,
    remarks_on,
    training_records,
)
from strategies.engine.sampling import honest_population

Announce = Callable[[str], None]
"""Prints one line for the user."""


def restore(strategy: BaseStrategy, checkpoints: Checkpoints, number: int) -> ArrayRecord:
    """Restore a strategy's state after a round from its checkpoint, and return the shared parameters.

    Raises:
        StateError: If the checkpoint is missing or damaged.
    """
    stored, progress = checkpoints.load(number)
    of_server = {key.removeprefix(SERVER): value for key, value in stored.items() if key.startswith(SERVER)}
    strategy.load_server_state(of_server)
    strategy.progress = progress
    strategy.durable_versions = dict(progress.versions)
    return pack_arrays({key: value for key, value in stored.items() if not key.startswith(SERVER)})


class RecordedStrategy(Strategy):
    """Runs a strategy's rounds and writes the run's folder.

    Args:
        inner: The method's strategy.
        directory: The run's folder.
        announce: Receives one line per round, and warnings.
        roster: Tracks which nodes are present; None if the nodes of the inner strategy's setting do not change.
    """

    def __init__(
        self, inner: BaseStrategy, directory: RunDirectory, announce: Announce, roster: Roster | None = None
    ) -> None:
        self.inner = inner
        self.directory = directory
        self.announce = announce
        self.roster = roster
        self.checkpoints = Checkpoints(directory.path / "checkpoints")
        self._task = TASKS[inner.context.config.task]
        self._warned_of_unknown = False

    def resume(self, number: int) -> ArrayRecord:
        """Restore the checkpoint of a round, and return its shared parameters; the initial ones for round 0.

        Checkpoints and observations of later rounds are deleted, since these rounds are repeated.

        Raises:
            StateError: If the checkpoint is missing or damaged.
        """
        arrays = restore(self.inner, self.checkpoints, number) if number else self.inner.initial_arrays()
        for later in self.checkpoints.rounds():
            if later > number:
                self.checkpoints.path(later).unlink()
        forget_observations(self.directory.path, number)
        return arrays

    def _save(self, arrays: ArrayRecord) -> None:
        server_state = {SERVER + key: value for key, value in self.inner.server_state().items()}
        self.checkpoints.save(unpack_arrays(arrays) | server_state, self.inner.progress)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds after the inner strategy's last one, up to `num_rounds`.

        Raises:
            RunFailedError: If a simulation's process died twice in a row, or too many clients or nodes failed.
            ValueError: If `evaluate_fn` is given: the server holds no data.
        """
        if evaluate_fn is not None:
            raise ValueError("evaluate_fn must be None: clients evaluate on their own data, the server holds none")
        for line in self.inner.warnings(self.inner.context.config):
            self.announce(f"warning: {line}")
        for line in planned(self.inner.context.config, num_elements(unpack_arrays(initial_arrays))):
            self.announce(line)
        arrays = initial_arrays
        # Not Flower's own loop: every round must end with its records and, where due, a checkpoint.
        config, progress = self.inner.context.config, self.inner.progress
        if config.keep == "best" and not progress.round:
            self._save(arrays)  # the initial state may be the best one
        for current in range(progress.round + 1, num_rounds + 1):
            if is_over(progress, config.early_stopping):
                break
            began = time.perf_counter()
            self._announce_phase(current)
            self._refresh_nodes(current)
            messages = self.configure_train(current, arrays, train_config or ConfigRecord(), grid)
            reduced, _ = self.inner.reduce(exchange(grid, messages, timeout, self.inner.record_repetition))
            arrays = arrays if reduced is None else reduced
            self._drop_nodes()
            self._record_training(current, time.perf_counter() - began)
            self._abort_if_failing()
            if self._is_checkpoint(current) or is_over(progress, config.early_stopping):
                self._save(arrays)
                # Nodes may delete older private state only once the server can no longer go back to it.
                self.inner.durable_versions = dict(self.inner.progress.versions)
        last = progress.round
        if is_over(progress, config.early_stopping):
            self.announce(over_text(progress, config))
        self._refresh_nodes(last)
        messages = self.configure_evaluate(last, arrays, evaluate_config or ConfigRecord(), grid)
        self.inner.collect(exchange(grid, messages, timeout))
        self._drop_nodes()
        self._record_evaluation(last)
        self._record_failures(f"round-{last:06d}-evaluation", "the evaluation")
        if not self.inner.outcome.finished:
            where = f"{self.directory.path}/failures"
            raise RunFailedError(f"no client could be evaluated after the last round; see {where}")
        result = Result()
        result.arrays = arrays
        return result

    def _refresh_nodes(self, current: int) -> None:
        """Update the setting to the nodes that are present now."""
        if self.roster:
            self._set_federation(self.roster.refresh(current))

    def _drop_nodes(self) -> None:
        """Remove from the setting the nodes that are gone, and the nodes to blame for refused replies."""
        outcome = self.inner.outcome
        if self.roster and (outcome.away or outcome.refused):
            for node, refused in outcome.blamed.items():
                for_good, is_failure = refused.is_harmful, refused.is_failure
                self.roster.exclude(node, refused.reason, for_good=for_good, is_failure=is_failure)
            self.roster.mark_away(outcome.away)
            self._set_federation(self.roster.federation)

    def _set_federation(self, federation: Federation) -> None:
        if federation.nodes != self.inner.context.federation.nodes:
            self.inner.context = replace(self.inner.context, federation=federation)
            if self.roster:
                document = read_manifest(self.directory.path)
                self.directory.write_json("manifest.json", manifest.with_nodes(document, self.roster))

    def _is_checkpoint(self, current: int) -> bool:
        """Return whether a round ends with a checkpoint.

        With `keep = best` every round has one, since clients measure later whether it was the best. With client
        sampling the round before the last has one, too, if the last round trains all clients: a run resumed with more
        rounds must repeat it as an ordinary round. The last round of a phase also has one.
        """
        config = self.inner.context.config
        before_last = config.trains_all(current + 1) and not config.trains_all(current)
        ends_phase = self.inner.phase(current) != self.inner.phase(current + 1)
        # A repeated round with another crowd tells the difference, and one with other noise spends more.
        if config.secagg.enabled or config.privacy.protects_clients or config.weight_epsilon:
            return True
        if config.keep == "best":
            return True
        return current % config.checkpoint_every == 0 or current == config.num_rounds or before_last or ends_phase

    def _abort_if_failing(self) -> None:
        config, progress = self.inner.context.config, self.inner.progress
        failed, trainings = progress.failed_trainings, progress.trainings
        path = self.directory.path
        where = f"see {path}/failures"
        example = next((f": {failure.reason}" for failure in self.inner.outcome.failures), "")
        if progress.failed_rounds >= config.max_failed_rounds:
            rounds = f"{progress.failed_rounds} rounds in a row"
            raise run_failed(path, f"no sampled client finished in {rounds}{example}; {where}")
        if failed > config.failure_budget * trainings:
            budget = f"more than failure-budget = {config.failure_budget:g} of them"
            raise run_failed(path, f"{failed} of {trainings} client trainings failed, {budget}{example}; {where}")
        if failed == trainings and progress.round == config.num_rounds:
            raise run_failed(path, f"every client failed{example}; {where}")

    def _record_training(self, current: int, seconds: float) -> None:
        outcome, config = self.inner.outcome, self.inner.context.config
        if config.selects_rounds:
            note_means(self.inner.progress, TASKS[config.task], outcome.means(), current)
        self._warn_of_unknown_validation(current)
        self.directory.append(aggregate_records(outcome, current - 1))
        phase = self.inner.phase(current)
        population = honest_population(config, self.inner.context.federation, outcome.absent)
        record, *rows = training_records(outcome, config, current, phase, seconds, population)
        self.directory.append([record, *rows])
        self._record_failures(f"round-{current:06d}", f"round {current}")
        self._warn(f"round {current}")
        while self.inner.remarks:
            self.announce(f"round {current}: warning: {self.inner.remarks.pop(0)}")
        mean = mean_text(record, "personalized", asked(outcome, config, current), self._task)
        self.announce(
            f"round {current}/{config.num_rounds}{f' ({phase})' if phase else ''}: {mean}, {seconds:.1f} s"
            f"{nodes_text(self.roster)}"
        )
        if current == 1 and outcome.finished and nodes_text(self.roster):
            self.announce(". ".join(filter(None, (f"round 1 {costs_text(record, rows)}", self.inner.lighter()))))

    def _announce_phase(self, current: int) -> None:
        if (phase := self.inner.phase(current)) != self.inner.phase(current - 1):
            self.announce(f"the phase {phase} begins with round {current} of {self.inner.context.config.num_rounds}")

    def _record_failures(self, prefix: str, phase: str) -> None:
        failures = self.inner.outcome.failures
        self.directory.write_failures(prefix, failures)
        for failure in failures:
            self.announce(f"{phase}: client {failure.client} is left out: {failure.reason}")

    def _warn(self, phase: str) -> None:
        for line in remarks_on(self.inner.outcome, self._task):
            self.announce(f"{phase}: warning: {line}")

    def _warn_of_unknown_validation(self, current: int) -> None:
        config, outcome = self.inner.context.config, self.inner.outcome
        if config.selects_rounds and outcome.finished and not outcome.measured and not self._warned_of_unknown:
            self._warned_of_unknown = True
            self.announce(
                f"warning: the accuracy on validation data is not known in round {current}, since nodes with "
                f"max-epsilon send no metrics; early-stopping and keep = best of the global state leave out such rounds"
            )

    def _record_evaluation(self, num_rounds: int) -> None:
        """Record the evaluation of the final global state; the mean over drawn clients is printed with its error."""
        config, outcome = self.inner.context.config, self.inner.outcome
        population = config.num_clients - len(outcome.absent)
        is_drawn = config.num_evaluated(population) < population
        honest = honest_population(config, self.inner.context.federation, outcome.absent)
        drawn_from = honest if is_drawn else None
        records = aggregate_records(outcome, num_rounds, drawn_from)
        self.directory.append(records)
        if config.keep == "best":
            self.directory.append(kept_records(outcome, num_rounds, drawn_from))
        self._warn("evaluation")
        if is_drawn:
            self.announce(
                f"evaluation: {mean_text(records[0], 'aggregate', config.num_evaluated(population), self._task)}"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Delegate to the inner strategy."""
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Delegate to the inner strategy."""
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Sequence[Message]:
        """Delegate to the inner strategy."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Delegate to the inner strategy."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Delegate to the inner strategy."""
        self.inner.summary()
