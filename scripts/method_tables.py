"""What the pages of methods show of the records."""

from collections.abc import Mapping

from experiments.number_formats import in_mb, in_percent, short, two_digits
from scripts.computed_tables import Convergence, DualCosts
from scripts.cross_tables import CrossTable, Part
from scripts.page_tables import Generated, RowTable, Table
from scripts.rate_tables import RATES_ON_DIGITS, rates_on
from scripts.study_tables import StudyTable
from scripts.upload_tables import OF_HYPERFL

COMPARED = (
    "apfl", "ditto", "fedala", "fedavg", "feddyn", "fedper", "fedprox", "fedrep", "fedrod", "hyperfl",
    "hyperfl-frozen", "knn-per", "lg-fedavg", "local", "moon", "per-fedavg", "pfedhn", "pfedhn-pc", "pfedme", "ppsgd",
    "priv-hfl", "scaffold",
)  # fmt: skip
"""Rows of the study `personalized`, of which each is on the page of the method with its name."""


def compared(row: str) -> RowTable:
    """Return the table of a method's accuracies in the study `personalized`."""
    numbers = {
        "rate": ("settings:learning-rate", short),
        "personalized": ("test_accuracy", in_percent),
        "worst tenth": ("test_accuracy_worst_decile", in_percent),
        "aggregate": ("test_accuracy_aggregate", in_percent),
    }
    return RowTable(records="personalized", row=row, numbers=numbers, against="fedavg")


OF_ALL_METHODS = CrossTable(
    records="personalized", text=in_percent, corner="method",
    headings={
        title: Part(column=column, numbers=("test_accuracy", "test_accuracy_aggregate"))
        for title, column in (("Fashion-MNIST", "fashion-mnist"), ("CIFAR-10", "cifar10"), ("Omniglot", "omniglot"))
    },
    shown={f"[`{row}`]({row}.md)": Part(row=row) for row in COMPARED},
)  # fmt: skip

FEDGEN: Mapping[str, Generated] = {
    f"fedgen-mnist-{column}": Table(
        records="fedgen-mnist",
        column=column,
        numbers={"last global model": ("global_test_accuracy_aggregate", in_percent)},
        papers={"FedGen's Table 1, three seeds": column},
    )
    for column in ("alpha-1", "alpha-0.1")
}

OF_ALL_CLASSES = {
    "global or mean model": ("global_test_accuracy_aggregate", in_percent),
    "clients', all data": ("global_test_accuracy", in_percent),
    "clients', own data": ("test_accuracy", in_percent),
}

PRIV_HFL: Mapping[str, Generated] = {
    **{
        f"priv-hfl-table-2-{column}": Table(
            records="priv-hfl-table-2",
            column=column,
            numbers=OF_ALL_CLASSES | {"MB up": ("bytes_up_per_client_round", in_mb)},
            papers={"paper": column},
        )
        for column in ("mnist-0.3", "mnist-0.6", "cifar10-0.3", "cifar10-0.6")
    },
    "priv-hfl-table-3": Table(
        records="priv-hfl-table-3", column="mnist", numbers=OF_ALL_CLASSES, papers={"paper": "mnist"}
    ),
    "priv-hfl-table-4": Table(
        records="priv-hfl-table-4", column="cifar10", numbers=OF_ALL_CLASSES, papers={"paper": "cifar10"}
    ),
    "priv-hfl-table-5": Table(
        records="priv-hfl-table-5",
        column="final",
        numbers={
            "rounds to 46 %": ("rounds_to_target_0.46_aggregate", short),
            "rounds to 49 %": ("rounds_to_target_0.49_aggregate", short),
            "% after 60 rounds": ("test_accuracy_aggregate", in_percent),
        },
        papers={"paper, to 75 %": "near", "paper, to 80 %": "final"},
    ),
    "convergence": Convergence(),
    "bytes-sent": DualCosts(
        amount="bytes_up_per_client_round",
        forms={"fedavg, mean, chain": "mean", "as printed": "dense"},
        with_size=True,
    ),
    "bytes-of-the-server": DualCosts(
        amount="server_state_bytes",
        forms={"mean": "mean", "chain": "chain", "chain, projected": "chain-projected", "as printed": "dense"},
    ),
    "bytes-of-a-client": DualCosts(
        amount="client_state_bytes", forms={"mean": "mean", "chain": "chain", "as printed": "dense"}
    ),
}

IT_PFL: Mapping[str, Generated] = {
    "it-pfl-encoder": Table(
        records="it-pfl-encoder",
        column="all",
        numbers={
            "distance in round 12": ("round:12:embedding_distance", two_digits),
            "in round 192": ("round:192:embedding_distance", two_digits),
            "novel clients, %": ("novel_descriptor", in_percent),
            "training clients, %": ("test_accuracy_aggregate", in_percent),
        },
    ),
    "it-pfl-omniglot": StudyTable(records="it-pfl-omniglot"),
}

PFEDHN: Mapping[str, Generated] = {
    "networks": Table(
        records="pfedhn-targets",
        column="fashion-mnist",
        numbers={
            "personalized, mean": ("test_accuracy", in_percent),
            "clients 0, 3, 6, 9": ("clients:0,3,6,9:test_accuracy", in_percent),
            "1, 4, 7, 10": ("clients:1,4,7,10:test_accuracy", in_percent),
            "2, 5, 8, 11": ("clients:2,5,8,11:test_accuracy", in_percent),
            "aggregate, mean": ("test_accuracy_aggregate", in_percent),
        },
        against="cnn",
    ),
}

OF_SINGLE_PAGES: Mapping[str, Mapping[str, Generated]] = {
    "fedgen": FEDGEN,
    "hyperfl": OF_HYPERFL,
    "it-pfl": IT_PFL,
    "index": {"all-methods": OF_ALL_METHODS},
    "pfedhn": PFEDHN,
    "priv-hfl": PRIV_HFL,
}

METHOD_TABLES: Mapping[str, Mapping[str, Generated]] = {
    f"methods/{name}.md": {
        **({"compared": compared(name)} if name in COMPARED else {}),
        **({"rates-on-digits": rates_on("digits", RATES_ON_DIGITS[name])} if name in RATES_ON_DIGITS else {}),
        **OF_SINGLE_PAGES.get(name, {}),
    }
    for name in sorted({*COMPARED, *RATES_ON_DIGITS, *OF_SINGLE_PAGES})
}
"""Tables by page, below docs/, and by the name in their marks."""
