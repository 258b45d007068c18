"""What the server asks clients beside training and evaluation: message types, and which of a client's data are meant.

A query to a node holds what a TRAIN message does (`hyperfl_flwr.protocol.messages`), and in `question` a `Question`.
The answer holds in `own-arrays` one or more arrays of each of the clients that have one, keyed `client/group/name`, and
in `clients` a `Report`. No label is part of an answer, and none is read but to count correct predictions (`ASSESS`).
"""

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from hyperfl_flwr.protocol.messages import record_of

DESCRIBE = "query.describe"
"""Brings an encoder; answered with the descriptor [1, d] of a client's training samples."""

ASSESS = "query.assess"
"""Brings M models, stacked [M, *shape] by `model/name`; answered with how many test samples each has right, `CORRECT`
int64 [M], and `TOGETHER` int64 [1], the sum of their logits."""

GRADIENTS = "query.gradients"
"""Brings linear classifiers `CLASSIFIERS` [M, D + 1], each of which tells the client's samples from those of another;
answered with the mean gradients over the client's samples, in the same shape, under the same key."""

ERRORS = "query.errors"
"""Brings the same; answered with `RATES` float64 [M], the share of the client's samples that each takes for the
other's."""

PERSONALIZE = "query.personalize"
"""Brings a novel node the model that was made for it, `model/name`; answered without arrays. This message and DESCRIBE
hold for a novel node, in `RECIPE`, what `hyperfl_flwr.models.model_spec.Recipe.values` returns."""

RECIPE, NOVEL = "recipe", "novel"
"""Name of that record, and of the property by which a node tells that it is a client that nobody has trained."""

PROBLEM = "problem"
"""Name of the property by which a node tells why it cannot take part."""

QUERIES = (DESCRIBE, ASSESS, GRADIENTS, ERRORS)

DESCRIPTOR = "embedding/weight"
"""Key of a client's descriptor [1, d]: what its model is generated of comes and goes under the same name."""

CORRECT, TOGETHER = "correct/each", "correct/together"
CLASSIFIERS, RATES = "classifiers/weight", "errors/rate"

QUESTION = "question"


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which of a client's data a query is about, and how they are protected.

    Attributes:
        corruption: A name from `hyperfl_flwr.data.corruptions.CORRUPTIONS`, or `none`.
        samples: Number of training samples that are used, drawn by the run's seed; None for all.
        epsilon: Of the noise on a descriptor; None for no noise.
        delta: Of that noise.
    """

    corruption: str = "none"
    samples: int | None = None
    epsilon: float | None = None
    delta: float = 0.0

    def to_record(self) -> ConfigRecord:
        """Pack into a record."""
        values = {"corruption": self.corruption, "samples": self.samples, "epsilon": self.epsilon, "delta": self.delta}
        return ConfigRecord({key: value for key, value in values.items() if value is not None})

    @classmethod
    def of(cls, content: RecordDict) -> "Question":
        """Return the question in a message's content; without one, that about all data as they are.

        Raises:
            ValueError: If the record is not what `to_record` makes.
        """
        if QUESTION not in content:
            return cls()
        values = dict(record_of(content, QUESTION, ConfigRecord))
        samples, epsilon = values.get("samples"), values.get("epsilon")
        if samples is not None and not (type(samples) is int and samples > 0):
            raise ValueError(f"a number of samples must be above 0, got {samples!r}")
        if epsilon is not None and not (isinstance(epsilon, float) and epsilon > 0):
            raise ValueError(f"epsilon must be above 0, got {epsilon!r}")
        if not isinstance(values.get("corruption"), str) or not isinstance(values.get("delta"), float):
            raise ValueError(f"a question needs a corruption and a delta, got {values}")
        return cls(
            corruption=str(values["corruption"]), samples=samples, epsilon=epsilon, delta=float(str(values["delta"]))
        )
