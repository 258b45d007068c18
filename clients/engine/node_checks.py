"""What a node's owner checks before a client answers, as `check-*`, `max-*` and `min-*` of the node config say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Literal

from hyperfl_flwr.config.node_config import NodeConfig
from hyperfl_flwr.core.errors import RefusalError
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.flower.log import log
from hyperfl_flwr.privacy.received_network import STATISTICS, Measured, Statistic

Action = Literal["warn", "refuse"]

REFUSED = "a check of this node's owner does not allow an answer; the node's log says which"
"""The text of each refusal: the server must not learn from it which property of the data decided."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What follows from a statistic of a received network.

    Attributes:
        action: What happens above the limit: a line in log and ledger, or also a refusal to train.
        limit: Largest value that is not reported.
    """

    action: Action
    limit: float


@dataclass(frozen=True, kw_only=True)
class NodeChecks:
    """The checks of a node's owner.

    Attributes:
        rules: The rules of the statistics that are checked.
        min_samples: Least number of training samples with which a client answers.
        min_steps: Least number of local steps in a round with which a client answers.
        min_test_samples: Least number of test samples, and of validation samples, with which a client answers.
        note: Writes what a check has found to the node's ledger.
    """

    rules: Mapping[Statistic, Rule]
    min_samples: int
    min_steps: int
    min_test_samples: int
    note: Callable[[str], None]

    def require_size(
        self, who: str, *, samples: int | None = None, steps: int | None = None, tests: int | None = None
    ) -> None:
        """Refuse an answer that comes from few samples or local steps.

        Args:
            who: The client and the round, for log and ledger.
            samples: Number of training samples that the answer comes from; None if it comes from none.
            steps: Number of local steps in a round that the answer comes from; None if it trains nothing.
            tests: Number of samples that a score comes from; None if it has no score.

        Raises:
            RefusalError: Naming the check to the owner, but not to the server.
        """
        sizes = (("min-samples", samples, self.min_samples, "training sample"),
                 ("min-steps", steps, self.min_steps, "local step"),
                 ("min-test-samples", tests, self.min_test_samples, "test or validation sample"))  # fmt: skip
        few = [
            f"{who}: {key} = {least}, but the answer would come from {counted(number, what)}; no answer is sent. Give "
            f"it more data, ask the operator for other settings, or lower {key} in the node config"
            for key, number, least, what in sizes
            if number is not None and number < least
        ]
        self._refuse(few)

    def judge(self, who: str, measured: Sequence[Measured]) -> None:
        """Report what the statistics of a received network exceed.

        Args:
            who: The client and the round, for log and ledger.
            measured: The largest value of each statistic.

        Raises:
            RefusalError: If one of those exceeded is to be refused; naming it to the owner, but not to the server.
        """
        found: dict[Action, list[str]] = {"warn": [], "refuse": []}
        for each in measured:
            rule = self.rules.get(each.statistic)
            if rule is not None and not each.value <= rule.limit:  # NaN exceeds every limit
                found[rule.action].append(f"{who}: {_text(each, rule)}")
        for text in found["warn"]:
            log(WARNING, "%s", text)
            self.note(text)
        self._refuse(found["refuse"])

    def _refuse(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.note(text)
        if texts:
            raise RefusalError("; ".join(texts), public=REFUSED)


def checks_of(node: NodeConfig, note: Callable[[str], None]) -> NodeChecks:
    """Return the checks of a node; a simulated node, which has no owner, makes only those that its config names.

    Args:
        node: The node's config.
        note: Writes what a check has found to the node's ledger.
    """
    rules: dict[Statistic, Rule] = {}
    for statistic in STATISTICS:
        name = statistic.replace("-", "_")
        action = getattr(node, f"check_{name}")
        if action != "off" and (not node.simulated or f"check_{name}" in node.model_fields_set):
            rules[statistic] = Rule(action=action, limit=getattr(node, f"max_{name}"))
    return NodeChecks(
        rules=rules,
        min_samples=node.min_samples,
        min_steps=node.min_steps,
        min_test_samples=node.min_test_samples,
        note=note,
    )


def _text(each: Measured, rule: Rule) -> str:
    where = f" of layer {each.layer}" if each.layer else ""
    what = "the client trains with it" if rule.action == "warn" else "the client does not train with it"
    return (
        f"check-{each.statistic}: the value {each.value:.4g}{where} of the received network is above "
        f"max-{each.statistic} = {rule.limit:g}; {what}. Ask the operator why; if the "
        f"reason is harmless, raise max-{each.statistic} in node.toml (the node config)"
    )
