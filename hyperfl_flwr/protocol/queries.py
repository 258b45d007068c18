"""Message types and formats of queries: requests to clients other than training and evaluation.

A query to a node holds the records of a TRAIN message (`hyperfl_flwr.protocol.messages`) and, in `question`, a
`QuerySpec`. The reply holds one or more arrays of each client in `per-client-arrays`, keyed `client/group/name` (absent
for clients without arrays), and a `Report` in `clients`. No reply contains labels. Clients read labels only to count
correct predictions (`ASSESS`, `SCORE_MODELS`).
"""

from dataclasses import dataclass

from flwr.app import ConfigRecord, RecordDict

from hyperfl_flwr.protocol.messages import record_of

DESCRIBE = "query.describe"
"""Sends an encoder; the reply holds the descriptor [1, d] of each client's training samples."""

COLUMNS = "columns"
"""Property of a node in the handshake: the SHA-256 of the names and the order of a CSV file's features."""

ASSESS = "query.assess"
"""Sends M models, stacked [M, *shape] by `model/name`; the reply holds the numbers of correctly classified test samples
of each model, `CORRECT` int64 [M], and of their ensemble (sum of logits), `ENSEMBLE` int64 [1]."""

GRADIENTS = "query.gradients"
"""Sends linear classifiers `CLASSIFIERS` [M, D + 1], each of which separates the client's samples from those of another
client; the reply holds the mean gradients over the client's samples, in the same shape, under the same key."""

ERRORS = "query.errors"
"""Sends the same classifiers as `GRADIENTS`; the reply holds `RATES` float64 [M], the share of the client's samples
that each classifier assigns to the other client."""

SEND_MODEL = "query.send_model"
"""Asks a client for its personalized model, for a cross-site matrix; the reply holds all values of its target network,
keyed `personalized/name`."""

SCORE_MODELS = "query.score_models"
"""Sends M personalized models of clients, stacked [M, *shape] by `personalized/name`; the reply holds the numbers of
correctly classified test samples of each, `CORRECT` int64 [M]."""

CROSS_SITE, PERSONALIZED = "cross-site", "personalized"
"""Name of the handshake property of a node that answers these two queries, and group of a personalized model."""

WITHHOLDS_METRICS = "withholds-metrics"
"""Name of the handshake property of a node that sends no metrics of its clients, and takes part in no secure sum of
metrics: its owner has set `max-epsilon`."""

PERSONALIZE = "query.personalize"
"""Sends a novel node the model that was generated for it, `model/name`; the reply has no arrays. This message, and
DESCRIBE to a novel node, hold the values of `hyperfl_flwr.models.model_spec.Recipe.values` in the record `RECIPE`."""

JOIN = "query.join"
"""Sends a node that joins a finished run the model that was generated for it, `model/name`; the reply holds the model's
change by local training, under the same keys, and after the last step no arrays. The message also holds the record
`RECIPE` and in `JOINING` a `JoiningStep`."""

JOINING, JOINS = "joining", "joins"
"""Name of that record, and of the handshake property that marks a node that joins a finished run."""

RECIPE, NOVEL = "recipe", "novel"
"""Name of that record, and of the handshake property that marks a novel node: its client was never trained."""

PROBLEM = "problem"
"""Name of the handshake property with the reason why a node cannot take part."""

QUERIES = (DESCRIBE, ASSESS, GRADIENTS, ERRORS, SEND_MODEL, SCORE_MODELS)

DESCRIPTOR = "embedding/weight"
"""Key of a client's descriptor [1, d], the input from which its model is generated; the same in both directions."""

CORRECT, ENSEMBLE = "correct/each", "correct/together"
CLASSIFIERS, RATES = "classifiers/weight", "errors/rate"

QUESTION = "question"


@dataclass(frozen=True, kw_only=True)
class JoiningStep:
    """A step of a client that joins a finished run.

    Attributes:
        settings: Settings of the run that the client takes over, by key, as JSON.
        number: Number of the step, from 1.
        is_last: Whether the client keeps the trained model instead of sending its change.
    """

    settings: str
    number: int
    is_last: bool

    def to_record(self) -> ConfigRecord:
        """Pack into a record."""
        return ConfigRecord({"settings": self.settings, "number": self.number, "is-last": self.is_last})

    @classmethod
    def of(cls, content: RecordDict) -> "JoiningStep":
        """Return the step in a message's content.

        Raises:
            ValueError: If the record does not have the format of `to_record`.
        """
        values = dict(record_of(content, JOINING, ConfigRecord))  # untrusted: check types before use
        settings, number, is_last = (values.get(key) for key in ("settings", "number", "is-last"))
        if not (isinstance(settings, str) and type(number) is int and number > 0 and isinstance(is_last, bool)):
            raise ValueError(f"a step must have settings (text), a number above 0 and is-last, got {values}")
        return cls(settings=settings, number=number, is_last=is_last)


@dataclass(frozen=True, kw_only=True)
class QuerySpec:
    """Selection of a client's data for a query, and the privacy budget of the reply.

    Attributes:
        corruption: Corruption of the data, a name from `hyperfl_flwr.data.corruptions.CORRUPTIONS` or `none`.
        samples: Number of training samples to use, drawn with the run's seed; None for all.
        epsilon: Privacy parameter epsilon of the noise on a descriptor; None for no noise.
        delta: Privacy parameter delta of that noise.
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
    def of(cls, content: RecordDict) -> "QuerySpec":
        """Return the question in a message's content; the default selects all data, unchanged and without noise.

        Raises:
            ValueError: If the record does not have the format of `to_record`.
        """
        if QUESTION not in content:
            return cls()
        values = dict(record_of(content, QUESTION, ConfigRecord))  # untrusted: check types before use
        samples, epsilon = values.get("samples"), values.get("epsilon")
        if samples is not None and not (type(samples) is int and samples > 0):
            raise ValueError(f"samples must be an integer above 0, got {samples!r}")
        if epsilon is not None and not (isinstance(epsilon, float) and epsilon > 0):
            raise ValueError(f"epsilon must be a float above 0, got {epsilon!r}")
        if not isinstance(values.get("corruption"), str) or not isinstance(values.get("delta"), float):
            raise ValueError(f"a question must have a corruption (text) and a delta (float), got {values}")
        return cls(
            corruption=str(values["corruption"]), samples=samples, epsilon=epsilon, delta=float(str(values["delta"]))
        )
