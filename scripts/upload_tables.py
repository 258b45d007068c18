"""Tables of what one upload and one sum reveal, on docs/privacy/threat-model.md and the pages that refer to it."""

from collections.abc import Mapping, Sequence

from experiments.number_formats import in_percent, one_digit, two_digits
from scripts.attack_tables import number_recovered, recovered_of, similarity
from scripts.cross_tables import CrossTable, Part
from scripts.page_tables import Generated, Table

RECONSTRUCTION = {
    "PSNR, dB": ("psnr", one_digit),
    "SSIM": ("ssim", two_digits),
    "best control, dB": ("control_psnr", one_digit),
}

WITH_NOISE = ("fedavg", "dp-fedavg", "centaur", "ppsgd")
"""Rows of the study `audit-table-3` that docs/privacy/differential-privacy.md shows."""

WITHOUT_NOISE = (
    "fedavg", "pfedhn", "pfedhn-pc", "hyperfl", "hyperfl-head", "hyperfl-fan", "hyperfl-fan-head", "fedavg-rog",
    "hyperfl-rog", "hyperfl-fan-rog", "hyperfl-fan-rog-read", "hyperfl-fan-tailored", "fedavg-dlg", "fedavg-prior",
    "hyperfl-fan-prior",
)  # fmt: skip
"""Its other rows."""

PAPER_OF_TABLE_3 = {
    "fashion-mnist": {"paper, EMNIST": "emnist"},
    "cifar10": {"paper": "cifar10"},
}
"""Headings of the paper's numbers in its columns, and which they are: Fashion-MNIST takes the place of EMNIST."""


def table_3(mark: str, rows: Sequence[str], columns: Sequence[str]) -> Mapping[str, Generated]:
    """Return tables of the study `audit-table-3` by the names in their marks: the given one and the column's."""
    return {
        f"{mark}-{column}": Table(
            records="audit-table-3", column=column, numbers=RECONSTRUCTION, rows=rows, papers=papers
        )
        for column, papers in PAPER_OF_TABLE_3.items()
        if column in columns
    }


BY_STEPS = {
    "1 image, 1 step": Part(column="one"),
    "4 images, 1 step": Part(column="four"),
    "8 images, 1 step": Part(column="eight"),
    "1 image, 5 steps": Part(column="epochs"),
    "1 image, 1 step, after 10 rounds of training": Part(column="trained"),
    "**600 images, 60 steps: the published round**": Part(column="round"),
}

OF_HYPERFL: Mapping[str, Generated] = {
    "by-steps": CrossTable(
        records="audit-head-gradient", corner="what a client does",
        headings={
            "HyperFL, `head-gradient`": Part(row="hyperfl", says=similarity),
            "FedAvg, gradient inversion": Part(row="fedavg", says=similarity),
        },
        shown={title: part for title, part in BY_STEPS.items() if part.column in ("one", "eight", "round")},
    ),
}  # fmt: skip
"""Tables of docs/methods/hyperfl.md."""

SUM_CHANNELS = {
    "`channels-known`: the activations are known": Part(row="channels-known", says=number_recovered),
    "`channels-ica`: the sum alone": Part(row="channels-ica", says=number_recovered),
    "`head-gradient`: the sum as one batch": Part(row="head-gradient", says=number_recovered),
}

ONE_UPLOAD: Mapping[str, Generated] = {
    **table_3("table-3", WITHOUT_NOISE, ("fashion-mnist",)),
    "by-steps": CrossTable(
        records="audit-head-gradient", corner="what a client does", shown=BY_STEPS,
        headings={
            "HyperFL": Part(row="hyperfl", says=similarity),
            "HyperFL, the public code's initialisation": Part(row="hyperfl-torch", says=similarity),
            "FedRep": Part(row="fedrep", says=similarity),
            "FedAvg, gradient inversion": Part(row="fedavg", says=similarity),
        },
    ),
    "digits": CrossTable(
        records="audit-digits", corner="what the server sees",
        headings={"`cnn`": Part(row="cnn", says=recovered_of), "`mlp`": Part(row="mlp", says=recovered_of)},
        shown={
            title: Part(column=column)
            for column, title in {
                "60-6": "one client, 6 steps on 60 images",
                "51-10": "one client, 10 steps on 51 images",
                "102-15": "one client, 15 steps on 102 images",
                "sum-5": "the sum of 5 clients, one step on one image each",
                "sum-10": "of 10 clients",
                "sum-20": "of 20 clients",
                "sum-30": "of 30 clients",
                "sum-60": "of 60 clients",
                "sum-100": "of 100 clients",
                "sum-10-60": "the sum of 10 clients, 6 steps on 60 images each",
            }.items()
        },
    ),
    "defences": CrossTable(
        records="audit-defences", corner="defence",
        headings={
            "attack": Part(column="leak", says=similarity),
            "strong prior": Part(column="leak-smooth", says=similarity),
            "personalized accuracy": Part(column="accuracy", numbers=("test_accuracy",)),
        },
        shown={
            "none": Part(row="none"),
            "clip norm 1": Part(row="clip"),
            "clip norm 1, multiplier 1e-4": Part(row="noise-1e-4"),
            "1e-3": Part(row="noise-1e-3"),
            "1e-2": Part(row="noise-1e-2"),
            "0.1": Part(row="noise-1e-1"),
        },
        text=in_percent,
    ),
    "channels": CrossTable(
        records="audit-sums", corner="what is in the sum", headings=SUM_CHANNELS,
        shown={
            "5 clients, hidden width 128": Part(column="five"),
            "5 clients, hidden width 4 (N = p + 1)": Part(column="four-units"),
            "5 clients, hidden width 2": Part(column="narrow"),
            "5 clients, one frozen embedding": Part(column="frozen"),
            "5 clients, one embedding at the start, after 5 rounds": Part(column="trained"),
            "20 clients, hidden width 128": Part(column="twenty"),
        },
    ),
}  # fmt: skip
"""Tables of docs/privacy/threat-model.md."""

SECURE_SUMS: Mapping[str, Generated] = {
    "sums": CrossTable(
        records="audit-secure-sums", corner="what is in the sum",
        headings={
            "PSNR (SSIM) [control]": Part(row="hyperfl-frozen", says=similarity),
            "recovered": Part(row="hyperfl-frozen", says=recovered_of),
        },
        shown={
            "5 clients, one step on one image each": Part(column="five"),
            "20 clients, one step on one image each": Part(column="twenty"),
            "20 clients, 10 steps on 100 images each": Part(column="twenty-100"),
        },
    ),
}  # fmt: skip
"""Tables of docs/privacy/secure-sums.md."""
