"""What each page and picture of the documentation shows of the records; `scripts/generate_results.py` writes it."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.records import read_record
from benchmarks.sections import SECTIONS
from benchmarks.tables import target_table
from experiments.matrix import WHAT_TO_CHOOSE, Matrix
from experiments.number_formats import in_mb, in_percent, one_digit, short, three_digits, two_digits
from scripts.attack_tables import ATTACKS, MALICIOUS_SERVERS
from scripts.computed_tables import Thresholds
from scripts.method_tables import METHOD_TABLES
from scripts.page_tables import Figure, Generated, Table
from scripts.poisoning_tables import POISONING, WITHOUT_MALICIOUS_NODES
from scripts.rate_tables import rates_on
from scripts.upload_tables import ONE_UPLOAD, SECURE_SUMS, WITH_NOISE, table_3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The tables of a section of the benchmark, and where their numbers come from.

    Attributes:
        section: Name of the section.
        only: Position of the only table that is shown; None for all.
    """

    section: str
    only: int | None = None

    def lines(self) -> list[str]:
        """Return the tables in Markdown."""
        section, record = SECTIONS[self.section], read_record(self.section)
        tables = section.tables(section.kind.validate_python(record.measured))
        shown = tables if self.only is None else [tables[self.only]]
        return "\n\n".join([*shown, record.source()]).split("\n")


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The targets of all sections of the benchmark beside what was measured."""

    def lines(self) -> list[str]:
        """Return the table in Markdown."""
        read = [(section, read_record(name).measured) for name, section in SECTIONS.items()]
        rows = [row for section, measured in read for row in section.targets(section.kind.validate_python(measured))]
        return target_table(rows).split("\n")


PRIVACY_COST = {
    "z": ("settings:privacy.noise-multiplier", short),
    "ε": ("privacy.epsilon", short),
    "personalized": ("test_accuracy", in_percent),
    "aggregate": ("test_accuracy_aggregate", in_percent),
}

RECORD_PRIVACY = {
    "personalized": ("test_accuracy", in_percent),
    "aggregate": ("test_accuracy_aggregate", in_percent),
    "ε": ("privacy.epsilon", short),
}

OF_UPLOAD = {
    "accuracy, %": ("test_accuracy", in_percent),
    "received model, %": ("test_accuracy_aggregate", in_percent),
    "bias gradient, R²": ("interval:upload_bias_r2", two_digits),
    "regression, R²": ("interval:upload_regression_r2", two_digits),
    "bias gradient, points off": ("upload_bias_error", in_percent),
    "regression, points off": ("upload_regression_error", in_percent),
    "mean share, points off": ("upload_prior_error", in_percent),
    "control, R²": ("interval:upload_permuted_r2", two_digits),
}

OF_SUM = {
    "bias gradient, R²": ("interval:sum_bias_r2", two_digits),
    "regression, R²": ("interval:sum_regression_r2", two_digits),
    "bias gradient, points off": ("sum_bias_error", in_percent),
    "regression, points off": ("sum_regression_error", in_percent),
    "mean share, points off": ("sum_prior_error", in_percent),
    "control, R²": ("interval:sum_permuted_r2", two_digits),
}

SUMMED = (
    "one-step", "fedavg", "fedrep", "hyperfl", "hyperfl-frozen", "fedavg-epsilon-8", "fedavg-client-0.02",
    "fedrep-epsilon-8", "fedavg-client-0.2",
)  # fmt: skip
"""Rows of the study `property` in which the uploads of all clients are summed."""

SHARE_ABOVE = {
    "first upload, bias gradient": ("interval:upload_bias_auc", two_digits),
    "first upload, regression": ("interval:upload_regression_auc", two_digits),
    "all uploads, bias gradient": ("interval:server_bias_auc", two_digits),
    "all uploads, regression": ("interval:server_regression_auc", two_digits),
    "exported model, regression": ("interval:model_regression_auc", two_digits),
}

ATTACKERS = {"server": "server", "another client": "client", "exported model": "model"}
"""Attackers in a membership game, by their headings."""

LIKELIHOOD = {
    **{heading: (f"interval:{who}_lira_auc", three_digits) for heading, who in ATTACKERS.items()},
    "control, exported model": ("interval:model_control_auc", three_digits),
}

FOUND_MEMBERS = {f"{heading}, %": (f"{who}_lira_tpr_0.01", in_percent) for heading, who in ATTACKERS.items()}

LOSS_THRESHOLD = {heading: (f"interval:{who}_loss_auc", three_digits) for heading, who in ATTACKERS.items()}

PERSONALIZED = {
    "personalized": ("test_accuracy", in_percent),
    "worst tenth": ("test_accuracy_worst_decile", in_percent),
    "aggregate": ("test_accuracy_aggregate", in_percent),
    "MB up": ("bytes_up_per_client_round", in_mb),
    "MB down": ("bytes_down_per_client_round", in_mb),
}

AFTER_200 = "paper, 200 rounds"

TABLE_1 = Table(
    records="table-1", column="fashion-mnist-20", against="fedavg-tuned", papers={AFTER_200: "fashion-mnist-20"},
    rows=("local", "fedavg", "fedrep", "hyperfl", "fedavg-tuned", "hyperfl-tuned", "hyperfl-frozen"),
    numbers={
        "personalized": ("test_accuracy", in_percent),
        "highest of all rounds": ("best_accuracy", in_percent),
        "worst tenth": ("test_accuracy_worst_decile", in_percent),
        "aggregate": ("test_accuracy_aggregate", in_percent),
        "MB up": ("bytes_up_per_client_round", in_mb),
    },
)  # fmt: skip

AFTER_20 = {
    **{f"personalized, {number}": (f"round:{number}:personalized_accuracy", in_percent) for number in (5, 10, 20)},
    **{f"aggregate, {number}": (f"round:{number}:aggregate_accuracy", in_percent) for number in (5, 10, 20)},
    "worst client": ("test_accuracy_worst", in_percent),
    "MB up": ("bytes_up_per_client_round", in_mb),
}
"""Accuracies after 5, 10 and 20 rounds."""

SECONDS = {"seconds per round": ("seconds_per_round", one_digit)}

ELSEWHERE = ("quickstart", "noisy-steps", "secure-sums", "robust-rules", "node-checks")
"""Sections of the benchmark that other pages show than the one on performance."""

TABLES: Mapping[str, Mapping[str, Generated]] = {
    "results/performance.md": {
        "targets": Targets(),
        **{name: Measured(section=name) for name in SECTIONS if name not in ELSEWHERE},
    },
    "results/index.md": {"quickstart": Measured(section="quickstart")},
    "results/hyperfl.md": {
        "table-1-fashion-mnist-20": TABLE_1,
        **{
            f"after-20-rounds-{column}": Table(
                records="table-1-after-20",
                column=column,
                numbers=AFTER_20,
                papers={AFTER_200: column},
                rows=("local", "fedavg", "pfedhn", "pfedhn-pc", "fedrep", "hyperfl", "hyperfl-torch"),
            )
            for column in ("fashion-mnist-20", "cifar10-20")
        },
    },
    "results/rates.md": {
        f"tuning-{column}": rates_on(column) for column in ("fashion-mnist", "cifar10", "omniglot", "digits")
    },
    "results/personalized.md": {
        f"personalized-{column}": Table(records="personalized", column=column, numbers=PERSONALIZED, against="fedavg")
        for column in ("fashion-mnist", "cifar10", "omniglot")
    },
    **METHOD_TABLES,
    "privacy/robust-reductions.md": {
        "robust-rules": Measured(section="robust-rules"),
        "robust-cost": WITHOUT_MALICIOUS_NODES,
    },
    "privacy/secure-sums.md": {
        "thresholds": Thresholds(),
        "secure-sums": Measured(section="secure-sums"),
        **SECURE_SUMS,
    },
    "privacy/differential-privacy.md": {
        "noisy-steps": Measured(section="noisy-steps"),
        **{
            f"private-table-1-{column}": Table(
                records="private-table-1",
                column=column,
                numbers=RECORD_PRIVACY,
                against="local-tuned",
                papers={AFTER_200: column},
            )
            for column in ("fashion-mnist-20", "cifar10-20")
        },
        "table-4-fashion-mnist": Table(records="table-4", column="fashion-mnist", numbers=SECONDS),
        **{
            f"client-privacy-{column}": Table(records="client-privacy", column=column, numbers=PRIVACY_COST)
            for column in ("n20-r10", "n20-r50", "n100-r10", "n100-r50")
        },
        **table_3("private-table-3", WITH_NOISE, ("fashion-mnist", "cifar10")),
    },
    "privacy/poisoning.md": POISONING,
    "privacy/malicious-servers.md": MALICIOUS_SERVERS,
    "privacy/audit.md": ATTACKS,
    "privacy/node-checks.md": {
        f"node-checks-{name}": Measured(section="node-checks", only=number)
        for number, name in enumerate(("honest", "few-classes", "forged", "time"))
    },
    "privacy/threat-model.md": {
        **ONE_UPLOAD,
        "membership": Table(
            records="membership",
            column="model",
            numbers={
                f"{heading}, {attack}": (f"{who}_{key}_auc", three_digits)
                for heading, who in ATTACKERS.items()
                for attack, key in (("likelihood", "lira"), ("loss", "loss"))
            },
            rows=("local", "fedavg", "fedrep", "hyperfl"),
        ),
        "property": Table(
            records="property",
            column="upload",
            numbers={
                "first upload": ("interval:upload_regression_r2", two_digits),
                "all uploads": ("interval:server_regression_r2", two_digits),
                "sums": ("interval:sum_regression_r2", two_digits),
                "exported model": ("interval:model_regression_r2", two_digits),
            },
            rows=("local", "fedavg", "pfedhn", "fedrep", "hyperfl", "hyperfl-frozen"),
        ),
    },
    "privacy/membership.md": {
        "membership-likelihood": Table(records="membership", column="model", numbers=LIKELIHOOD),
        "membership-found": Table(records="membership", column="model", numbers=FOUND_MEMBERS),
        "membership-loss": Table(records="membership", column="model", numbers=LOSS_THRESHOLD),
    },
    "privacy/property.md": {
        "property-upload": Table(records="property", column="upload", numbers=OF_UPLOAD),
        "property-sum": Table(records="property", column="upload", numbers=OF_SUM, rows=SUMMED),
        "property-above": Table(records="property", column="upload", numbers=SHARE_ABOVE),
    },
    "privacy/what-to-choose.md": {"what-to-choose": Matrix(records="what-to-choose", shown=WHAT_TO_CHOOSE)},
}
"""Tables by page, below docs/, and by the name in their marks."""

FIGURES: Mapping[str, Figure] = {
    "privacy-cost.png": Figure(records="client-privacy", kind="privacy-cost"),
    "privacy-rounds.png": Figure(
        records="client-privacy",
        kind="personalized_accuracy",
        columns=("n20-r50", "n100-r50"),
        rows=("local", *(f"{method}-{noise}" for method in ("fedrep", "hyperfl-frozen") for noise in (0, 0.015, 0.05))),
    ),
    "accuracy-bytes.png": Figure(records="what-to-choose", kind="accuracy-bytes", columns=("accuracy",)),
    "leakage-accuracy.png": Figure(records="what-to-choose", kind="leakage-accuracy"),
    "personalized-bytes.png": Figure(records="personalized", kind="accuracy-bytes", columns=("fashion-mnist",)),
    "table-1-rounds.png": Figure(records="table-1", kind="personalized_accuracy", columns=("fashion-mnist-20",)),
    "membership.png": Figure(records="membership", kind="membership"),
    "property.png": Figure(records="property", kind="property"),
}
"""Figures by picture, below docs/pictures/."""
