"""Tables of docs/privacy/poisoning.md, from the records of the study `robustness`."""

from collections.abc import Mapping

from experiments.number_formats import in_percent
from scripts.cross_tables import CrossTable, Part

RECORDS = "robustness"

ACCURACIES = ("test_accuracy", "test_accuracy_aggregate")

SUCCESSES = ("backdoor_success", "backdoor_success_aggregate")

ATTACKS = {
    "label-flip": "`label-flip`",
    "sign-flip": "`sign-flip`",
    "alie": "`alie`",
    "ipm": "`ipm`, ε = 2",
    "backdoor": "`backdoor`",
}
"""Titles of the attacks of the study's columns."""

METHODS = {"fedavg": "FedAvg", "fedrep": "FedRep", "hyperfl": "HyperFL (`hidden-width` 16)", "pfedhn": "pFedHN"}
"""Titles of the study's rows whose clients are averaged."""


def _lines(shares: Mapping[int, str], before: str = "") -> dict[str, Part]:
    """Return a line without malicious nodes, one for each share and attack, and the successes of the backdoors."""
    lines = {
        "none": Part(column=f"{before}honest", numbers=ACCURACIES),
        "success of a backdoor, no malicious node": Part(column=f"{before}honest", numbers=SUCCESSES),
    }
    for share, title in shares.items():
        for attack, name in ATTACKS.items():
            lines[name + title] = Part(column=f"{before}{attack}-{share}", numbers=ACCURACIES)
        lines[f"success of the backdoor{title}"] = Part(column=f"{before}backdoor-{share}", numbers=SUCCESSES)
    return lines


ONE_MALICIOUS = {
    "none": Part(column="honest", numbers=ACCURACIES),
    "`label-flip`": Part(column="label-flip-5", numbers=ACCURACIES),
    "`sign-flip`": Part(column="sign-flip-5", numbers=ACCURACIES),
    "`sign-flip`, scale 5": Part(column="long-sign-flip-5", numbers=ACCURACIES),
    "`ipm`, ε = 2": Part(column="ipm-5", numbers=ACCURACIES),
    "`backdoor`": Part(column="backdoor-5", numbers=ACCURACIES),
    "success of the backdoor": Part(column="backdoor-5", numbers=SUCCESSES),
}

UNSCALED = ("median", "multi-krum", "geometric-median")
"""Rules against a backdoor that is not scaled."""

RULES = ("norm-bound", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median")

POISONING = {
    "malicious-nodes": CrossTable(
        records=RECORDS, text=in_percent, corner="attack",
        headings={title: Part(row=row, seed=0) for row, title in METHODS.items()},
        shown=_lines({share: f", {share} %" for share in (10, 20, 40)}),
    ),
    "one-malicious-node": CrossTable(
        records=RECORDS, text=in_percent, corner="attack",
        headings={
            f"{METHODS[row]}, seed {seed}": Part(row=row, seed=seed) for row in ("pfedhn", "fedavg") for seed in (0, 1)
        },
        shown=ONE_MALICIOUS,
    ),
    "robust-rules-malicious-nodes": CrossTable(
        records=RECORDS, text=in_percent, corner="`robust.reduction`",
        headings={
            "no malicious node": Part(column="honest", numbers=ACCURACIES),
            **{title: Part(column=f"{attack}-20", numbers=ACCURACIES) for attack, title in list(ATTACKS.items())[1:]},
            "its success": Part(column="backdoor-20", numbers=SUCCESSES),
        },
        shown={
            "`mean`": Part(row="fedavg", seed=0), **{f"`{rule}`": Part(row=f"fedavg-{rule}", seed=0) for rule in RULES}
        },
    ),
    "unscaled-backdoor": CrossTable(
        records=RECORDS, text=in_percent, corner="`adversary.scale = 1`",
        headings={
            "`mean`": Part(row="fedavg", seed=0),
            **{f"`{rule}`": Part(row=f"fedavg-{rule}", seed=0) for rule in UNSCALED},
        },
        shown={
            "accuracy of honest clients": Part(column="unscaled-backdoor-20", numbers=ACCURACIES),
            "success of the backdoor": Part(column="unscaled-backdoor-20", numbers=SUCCESSES),
        },
    ),
    "malicious-nodes-fashion-mnist": CrossTable(
        records=RECORDS, text=in_percent, corner="attack",
        headings={METHODS[row]: Part(row=row, seed=0) for row in ("fedavg", "pfedhn")},
        shown=_lines({20: ", 20 %"}, before="fashion-"),
    ),
}  # fmt: skip
"""The page's tables by the names in their marks."""

WITHOUT_MALICIOUS_NODES = CrossTable(
    records="robust-cost", text=in_percent, corner="`robust.reduction`",
    headings={
        f"{title}, {kind}": Part(column=column, numbers=(number,))
        for column, title in (("fedavg", "FedAvg"), ("fedrep", "FedRep"), ("hyperfl", "HyperFL"))
        for kind, number in zip(("personalized", "aggregate"), ACCURACIES, strict=True)
    },
    shown={f"`{rule}`": Part(row=rule) for rule in ("mean", *RULES)},
)  # fmt: skip
"""The table of docs/privacy/robust-reductions.md."""
