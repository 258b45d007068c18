"""Assesses novel clients after the last round: they were never trained, and their labels only count what is right.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, section 6. A method's strategy names the
ways in which it gives such a client a model:

- `global`: the one model that all clients share;
- `sampled`: one of the training clients' models, drawn at random: the mean over all of them is told;
- `ensemble`: all of these models together, by the mean of their logits;
- `nearest`: the model of the training client whose samples are hardest to tell from the novel client's, see
  `strategies.novel.nearest`;
- `descriptor`: a model that is generated of a descriptor of the client's samples.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from hyperfl_flwr.core.errors import RunFailedError
from hyperfl_flwr.protocol.arrays import SharedArrays, num_bytes, pack_arrays, unpack_arrays
from hyperfl_flwr.protocol.messages import Failure
from hyperfl_flwr.protocol.queries import ASSESS, CORRECT, DESCRIPTOR, TOGETHER, Question
from hyperfl_flwr.runs.novel_results import NovelRecord, described
from hyperfl_flwr.runs.run_directory import RunDirectory
from strategies.engine.base import BaseStrategy
from strategies.engine.query_clients import Answers, Query, ask, descriptors_of
from strategies.engine.recorded import Announce
from strategies.novel.nearest import Distances, find_distances


def assess_novel_clients(
    grid: Grid, strategy: BaseStrategy, arrays: ArrayRecord, directory: RunDirectory, announce: Announce
) -> None:
    """Assess all novel clients in all ways that the method has, and write novel.json.

    Args:
        grid: Flower's grid.
        strategy: Of the run, after its last round.
        arrays: The shared parameters then.
        directory: The run's folder.
        announce: Receives the results in words, and who was left out.

    Raises:
        RunFailedError: If no client could be assessed, or a node's process died twice in a row.
    """
    config = strategy.setting.config
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
    """What a novel client has right of n test samples, of M models."""

    correct: list[int]
    together: int
    total: int


class _Assessment:
    """Asks the novel clients, and keeps the records and failures."""

    def __init__(self, grid: Grid, strategy: BaseStrategy, arrays: ArrayRecord) -> None:
        self._grid, self._strategy, self._arrays = grid, strategy, arrays
        self._config = strategy.setting.config
        self._novel = list(range(self._config.num_clients, self._config.hosted_clients))
        self.records: list[NovelRecord] = []
        self.failures: list[Failure] = []

    def run(self, corruption: str) -> None:
        """Assess all clients in all ways, with their samples corrupted in one."""
        if "descriptor" in self._strategy.ways:
            for amount in self._config.novel.amounts:
                for epsilon in self._config.novel.budgets:
                    question = Question(
                        corruption=corruption, samples=amount, epsilon=epsilon, delta=self._config.novel.delta
                    )
                    self.records += self._of_descriptors(question)
        else:
            self.records += self._of_models(corruption)

    def _of_models(self, corruption: str) -> Iterator[NovelRecord]:
        """Yield the records of the ways that choose among models which the server has."""
        models = self._strategy.models(unpack_arrays(self._arrays))
        number = len(next(iter(models.values())))
        query = Query(
            kind=ASSESS,
            clients=self._novel,
            expected=dict.fromkeys(self._novel, _expected(number)),
            shared=pack_arrays(models),
            question=Question(corruption=corruption),
        )
        counts = self._counts(self._ask(query))
        size = num_bytes(models) // number
        distances = Distances()
        if "nearest" in self._strategy.ways:
            distances = find_distances(self._grid, self._strategy.setting, corruption)
            self.failures += distances.failures
        for client, found in counts.items():
            for way in self._strategy.ways:
                if way != "nearest":
                    yield _chosen(way, client, corruption, found, size)
                elif distances.between.get(client):
                    yield _nearest(client, corruption, found, size, distances)

    def _of_descriptors(self, question: Question) -> Iterator[NovelRecord]:
        """Yield the records of models that are generated of descriptors."""
        dimension = self._strategy.descriptor_dimension
        query = descriptors_of(self._novel, self._arrays, dimension, question)
        descriptors = self._ask(query)
        models = self._strategy.models_of({client: own[DESCRIPTOR] for client, own in descriptors.arrays.items()})
        if not models:
            return
        assess = Query(
            kind=ASSESS,
            clients=list(models),
            expected=dict.fromkeys(models, _expected(1)),
            own=models,
            question=Question(corruption=question.corruption),
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
        answers = ask(self._grid, self._strategy.setting, self._config.num_rounds, query)
        self.failures += answers.failures
        return answers

    def _counts(self, answers: Answers) -> Mapping[int, _Counts]:
        """Return the counts of the clients that have answered with possible ones."""
        counts = {}
        for client, arrays in sorted(answers.arrays.items()):
            total, correct, (together,) = answers.num_examples[client], arrays[CORRECT].tolist(), arrays[TOGETHER]
            if all(0 <= count <= total for count in (*correct, together)):
                counts[client] = _Counts(correct=correct, together=int(together), total=total)
            else:
                reason = f"correct predictions must be between 0 and {total}"
                self.failures.append(Failure(client=client, reason=reason))
        return counts


def _expected(number: int) -> SharedArrays:
    """Return the layout of a client's counts of so many models."""
    return {CORRECT: np.zeros(number, np.int64), TOGETHER: np.zeros(1, np.int64)}


def _chosen(way: str, client: int, corruption: str, found: _Counts, size: int) -> NovelRecord:
    """Return the record of a way that does not look at the client's samples; `size` is that of a model in bytes."""
    number = len(found.correct)
    correct = {"global": found.correct[0], "sampled": sum(found.correct) / number, "ensemble": found.together}[way]
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
    """Return the record of the nearest training client's model."""
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
