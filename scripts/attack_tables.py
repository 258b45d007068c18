"""Tables of what attacks find, on docs/privacy/audit.md and docs/privacy/malicious-servers.md."""

from collections.abc import Callable, Mapping
from typing import Any

from scripts.cross_tables import CrossTable, Part

Summary = Mapping[str, Any]

VERDICTS = {1.0: "recovered", 0.5: "recovered some", 0.0: "recovered nothing"}
"""Verdicts of reconstructions, by the number `recovered` of summary.json."""


def found_by(attack: str) -> Callable[[Summary], str]:
    """Return a function for the images that one of a cell's attacks has recovered, and in brackets the PSNRs in dB.

    These are the median of all images and the better control's mean. The number is bold if more are recovered than by
    chance. An attack that the cell lacks was refused.
    """

    def text(summary: Summary) -> str:
        found = summary.get("attacks", {summary["strongest"]: summary}).get(attack)
        if found is None:
            return "refused"
        mark = "**" if found["recovered"] else ""
        return f"{mark}{found['images_recovered']}{mark} ({found['psnr_median']:.1f}; {found['control_psnr']:.1f})"

    return text


def clients_read(summary: Summary) -> str:
    """Return the number of clients of which an image is recovered, and in brackets by that of the next client.

    An attack that had nothing to read at any client has no number.
    """
    if "images_recovered" not in summary:
        return "nothing to read"
    next_client = summary.get("next_client_images_recovered")
    return f"{summary['images_recovered']}" + ("" if next_client is None else f" ({next_client})")


def reconstruction(summary: Summary) -> str:
    """Return the mean PSNR of all images, and the better control's in square brackets, in dB."""
    return f"{summary['psnr']:.1f} [{summary['control_psnr']:.1f}]"


def similarity(summary: Summary) -> str:
    """Return the mean PSNR in dB and, in brackets, the mean SSIM; in square brackets the better control's PSNR.

    The number is bold if the attack has recovered images, all or some.
    """
    mark = "**" if summary["recovered"] else ""
    return f"{mark}{summary['psnr']:.1f}{mark} ({summary['ssim']:z.2f}) [{summary['control_psnr']:.1f}]"


def number_recovered(summary: Summary) -> str:
    """Return the mean PSNR in dB, and in brackets the number of images that are recovered."""
    return f"{summary['psnr']:.1f} ({summary['images_recovered']})"


def recovered_of(summary: Summary) -> str:
    """Return the number of recovered images, and of how many."""
    return f"{summary['images_recovered']} of {summary['images']}"


def recovered(summary: Summary) -> str:
    """Return the verdict, and of how many images it is true."""
    return f"{VERDICTS[summary['recovered']]}: {recovered_of(summary)}"


BOTH = ("imprint", "trap-weights")

METHODS = {
    "fedavg": "FedAvg", "fedrep": "FedRep", "hyperfl": "HyperFL", "pfedhn": "`pfedhn`", "pfedhn-pc": "`pfedhn-pc`",
    "it-pfl": "`it-pfl`",
}  # fmt: skip
"""Titles of the rows of the study `malicious-servers`."""

OF_ONE_CLIENT = {
    "mlp-50-1": "`mlp`, 50 images, 1 step",
    "mlp-600-1": "`mlp`, 600 images, 1 step",
    "mlp-600-12": "`mlp`, 600 images, 12 steps",
    "mlp-600-60": "`mlp`, **600 images, 60 steps**",
    "cnn-50-1": "`cnn`, 50 images, 1 step",
    "cnn-600-60": "`cnn`, **600 images, 60 steps**",
    "lenet-600-60": "`lenet`, **600 images, 60 steps**",
}
"""Titles of its columns in which single uploads are read."""

SUMS = {
    "sum-5-8": "5 clients with 8 images",
    "sum-5-50": "5 clients with 50 images",
    "sum-20-8": "20 clients with 8 images",
    "sum-20-50": "20 clients with 50 images",
}
"""Titles of its columns of sums."""

MALICIOUS_SERVERS = {
    "malicious-servers": CrossTable(
        records="malicious-servers", corner="network and round; attack",
        headings={title: Part(row=row) for row, title in METHODS.items()},
        shown={
            f"{title}; `{attack}`": Part(column=column, says=found_by(attack))
            for column, title in OF_ONE_CLIENT.items() for attack in BOTH
        },
    ),
    "malicious-servers-sums": CrossTable(
        records="malicious-servers", corner="in the sum; attack",
        headings={METHODS[row]: Part(row=row) for row in ("fedavg", "fedrep", "hyperfl")},
        shown={
            f"{title}; `{attack}`": Part(column=column, says=found_by(attack))
            for column, title in SUMS.items() for attack in BOTH
        },
    ),
    "fishing": CrossTable(
        records="fishing", corner="clients",
        headings={
            "FedAvg, `fishing`": Part(row="fedavg-classifier"),
            "FedAvg, `feature-fishing`": Part(row="fedavg"),
            "`pfedhn`, `feature-fishing`": Part(row="pfedhn"),
        },
        shown={
            title: Part(column=column, says=clients_read)
            for column, title in {
                "mixed-8-1": "10 with 8 images of all classes, 1 step",
                "shirts-50-1": "10 with 50 T-shirts, 1 step",
                "shirts-50-5": "10 with 50 T-shirts, 5 steps",
                "shirts-200-20": "10 with 200 T-shirts, 20 steps",
                "shirts-600-1": "5 with 600 T-shirts, 1 step",
                "shirts-600-60": "5 with 600 T-shirts, **60 steps**",
                "shirts-sum": "the sum of 10 with 50 T-shirts, 1 step",
                "zeros-50-1": "10 with 50 zeros, 1 step",
                "zeros-200-20": "10 with 200 zeros, 20 steps",
            }.items()
        },
    ),
}  # fmt: skip
"""Tables of docs/privacy/malicious-servers.md by the names in their marks."""

UPLOADS = {
    "fedavg": ("FedAvg, 1 step on 1 image", ("ig", "ig-smooth", "ig-prior", "head-gradient", "dlg", "rog")),
    "hyperfl": ("HyperFL, 1 step on 1 image", ("head-gradient", "ig-prior", "tailored", "rog", "rog-paper")),
    "noise-0003": ("FedAvg, noise of 0.003", ("ig", "ig-smooth", "ig-prior", "head-gradient", "dlg", "rog")),
    "noise-003": ("FedAvg, noise of 0.03", ("ig", "ig-smooth", "ig-prior", "head-gradient", "dlg", "rog")),
    "eight": ("FedAvg, 1 step on 8 images", ("ig", "ig-smooth", "ig-prior", "head-gradient", "dlg", "rog")),
}
"""Titles of the columns of the study `attacks`, and the rows of each."""

NAMES = {"ig-smooth": "`ig`, total variation 0.03"}

ATTACKS = {
    "attacks": CrossTable(
        records="attacks", corner="upload; attack",
        headings={"mean PSNR [control], dB": Part(says=reconstruction), "verdict": Part(says=recovered)},
        shown={
            f"{title}; {NAMES.get(row, f'`{row}`')}": Part(row=row, column=column)
            for column, (title, rows) in UPLOADS.items() for row in rows
        },
    ),
}  # fmt: skip
"""Tables of docs/privacy/audit.md."""
