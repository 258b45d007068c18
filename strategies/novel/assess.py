"""Assess novel clients after the last round: clients that were never trained and provide no labels for training.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 6. The labels of a novel client's
test samples only serve to count correct predictions. A method's strategy lists the ways in which it provides a model:

- `global`: the single model that all clients share;
- `sampled`: the model of a training client drawn at random; reported is the mean over all training clients;
- `ensemble`: all of these models together, by the mean of their logits;
- `nearest`: the model of the training client with the samples that are hardest to distinguish from the novel client's,
  see `strategies.novel.nearest`;
- `descriptor`: a model generated from a descriptor of the client's samples.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.protocol.packing import pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.queries import ASSESS, CORRECT, DESCRIPTOR, ENSEMBLE, QuerySpec
from hyperfl_flwr.runs.novel_results import NovelRecord, described
from hyperfl_flwr.runs.run_directory import RunDirectory
from strategies.engine.base import BaseStrategy
from strategies.engine.query_clients import Answers, Query, ask, descriptors_of
from strategies.engine.recorded import Announce
from strategies.novel.nearest import Distances, find_distances


def assess_novel_clients(
    grid: Grid, strategy: BaseStrategy, arrays: ArrayRecord, directory: RunDirectory, announce: Announce
) -> None:
    """Assess all novel clients in all ways of the method, and write novel.json.

    Args:
        grid: Flower's grid.
        strategy: The run's strategy, after its last round.
        arrays: The shared parameters after the last round.
        directory: The run's folder.
        announce: Receives a summary of the results, and a line for each client that is left out.

    Raises:
        RunFailedError: If no client could be assessed, or a node's process died twice in a row.
    """
    config = strategy.context.config
    assessment = _Assessment(grid, strategy, arrays)
    for corruption in config.novel.corruptions.split(","):
        assessment.run(corruption)
    prefix = f"round-{config.num_rounds:06d}-novel"
    for failure in assessment.failures:
        announce(f"novel clients: client {failure.client} is left out: {failure.reason}")
    directory.write_failures(prefix, assessment.failures)
    if not assessment.records:
        raise RunFailedError(f"no novel client could be assessed; see {directory.path}/failures/{prefix}-*")
    directory.write_json("novel.json", [record.to_json() for record in assessment.records])
    announce(described(assessment.records))


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Numbers of correct predictions of M models on a novel client's n test samples.

    Attributes:
        correct: Correct predictions of each model, M numbers.
        ensemble: Correct predictions of the mean of the models' logits.
        total: Number of test samples n.
    """

    correct: list[int]
    ensemble: int
    total: int


class _Assessment:
    """Queries the novel clients and collects records and failures.

    Attributes:
        records: Results by way, client and question.
        failures: Clients that could not be assessed.
    """

    def __init__(self, grid: Grid, strategy: BaseStrategy, arrays: ArrayRecord) -> None:
        self._grid, self._strategy, self._arrays = grid, strategy, arrays
        self._config = strategy.context.config
        self._novel = list(range(self._config.num_clients, self._config.hosted_clients))
        self.records: list[NovelRecord] = []
        self.failures: list[Failure] = []

    def run(self, corruption: str) -> None:
        """Assess all clients in all ways, with one corruption of their samples."""
        # Only descriptors depend on the amount of samples and on noise.
        if "descriptor" in self._strategy.novel_modes:
            for amount in self._config.novel.amounts:
                for epsilon in self._config.novel.budgets:
                    question = QuerySpec(
                        corruption=corruption, samples=amount, epsilon=epsilon, delta=self._config.novel.delta
                    )
                    self.records += self._records_of_descriptors(question)
        else:
            self.records += self._records_of_server_models(corruption)

    def _records_of_server_models(self, corruption: str) -> Iterator[NovelRecord]:
        """Yield the records of the ways that choose among the server's models."""
        models = self._strategy.models(unpack_arrays(self._arrays))
        number = len(next(iter(models.values())))  # models are stacked along the first dimension
        query = Query(
            kind=ASSESS,
            clients=self._novel,
            expected=dict.fromkeys(self._novel, _expected(number)),
            shared=pack_arrays(models),
            question=QuerySpec(corruption=corruption),
        )
        counts = self._counts(self._ask(query))
        size = num_bytes(models) // number
        distances = Distances()
        if "nearest" in self._strategy.novel_modes:
            distances = find_distances(self._grid, self._strategy.context, corruption)
            self.failures += distances.failures
        for client, found in counts.items():
            for way in self._strategy.novel_modes:
                if way != "nearest":
                    yield _chosen(way, client, corruption, found, size)
                elif distances.between.get(client):
                    yield _nearest(client, corruption, found, size, distances)

    def _records_of_descriptors(self, question: QuerySpec) -> Iterator[NovelRecord]:
        """Yield the records of models that are generated from descriptors."""
        dimension = self._strategy.descriptor_dimension
        query = descriptors_of(self._novel, self._arrays, dimension, question)
        descriptors = self._ask(query)
        models = self._strategy.models_of(
            {client: per_client[DESCRIPTOR] for client, per_client in descriptors.arrays.items()}
        )
        if not models:
            return
        assess = Query(
            kind=ASSESS,
            clients=list(models),
            expected=dict.fromkeys(models, _expected(1)),
            per_client=models,
            question=QuerySpec(corruption=question.corruption),
        )
        for client, found in self._counts(self._ask(assess)).items():
            yield NovelRecord(
                way="descriptor",
                client=client,
                corruption=question.corruption,
                samples=descriptors.num_examples[client],
                all_samples=question.samples is None,
                epsilon=question.epsilon,
                accuracy=found.correct[0] / found.total,
                num_examples=found.total,
                bytes_down=num_bytes(unpack_arrays(self._arrays)) + num_bytes(models[client]),
                bytes_up=num_bytes(descriptors.arrays[client]),
                models=1,
            )

    def _ask(self, query: Query) -> Answers:
        answers = ask(self._grid, self._strategy.context, self._config.num_rounds, query)
        self.failures += answers.failures
        return answers

    def _counts(self, answers: Answers) -> Mapping[int, _Counts]:
        """Return the counts by client; clients with impossible counts are added to the failures."""
        counts = {}
        for client, arrays in sorted(answers.arrays.items()):
            total, correct, (ensemble,) = answers.num_examples[client], arrays[CORRECT].tolist(), arrays[ENSEMBLE]
            if all(0 <= count <= total for count in (*correct, ensemble)):
                counts[client] = _Counts(correct=correct, ensemble=int(ensemble), total=total)
            else:
                reason = f"numbers of correct predictions must be between 0 and {total}"
                self.failures.append(Failure(client=client, reason=reason))
        return counts


def _expected(number: int) -> SharedArrays:
    """Return the expected layout of a client's counts for a number of models."""
    return {CORRECT: np.zeros(number, np.int64), ENSEMBLE: np.zeros(1, np.int64)}


def _chosen(way: str, client: int, corruption: str, found: _Counts, size: int) -> NovelRecord:
    """Return the record of a way that does not use the client's samples; `size` is a model's size in bytes."""
    number = len(found.correct)
    correct = {"global": found.correct[0], "sampled": sum(found.correct) / number, "ensemble": found.ensemble}[way]
    sent = number if way == "ensemble" else 1
    return NovelRecord(
        way=way,
        client=client,
        corruption=corruption,
        accuracy=correct / found.total,
        num_examples=found.total,
        bytes_down=sent * size,
        models=sent,
    )


def _nearest(client: int, corruption: str, found: _Counts, size: int, distances: Distances) -> NovelRecord:
    """Return the record of the nearest training client's model; `size` is a model's size in bytes."""
    return NovelRecord(
        way="nearest",
        client=client,
        corruption=corruption,
        samples=distances.samples[client],
        accuracy=found.correct[distances.nearest(client)] / found.total,
        num_examples=found.total,
        bytes_down=size + distances.bytes_down[client],
        bytes_up=distances.bytes_up[client],
        bytes_of_others=distances.bytes_of_others[client],
        models=1,
    )
