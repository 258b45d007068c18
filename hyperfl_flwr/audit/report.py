"""Write the report of an audit: audit.json, a Markdown table, a picture, and a self-contained HTML page."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperfl_flwr.attacks.scoring import number_by_chance, number_recovered, verdict
from hyperfl_flwr.audit.audit import AttackResult
from hyperfl_flwr.audit.pictures import MOST_DECIBELS, PictureRow, draw_rows, picture_rows
from hyperfl_flwr.audit.record_round import AttackedRound
from hyperfl_flwr.audit.sentences import verdicts
from hyperfl_flwr.audit.threat import common, each, span, threat
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.files.atomic_files import write_atomically
from hyperfl_flwr.core.packages.code_version import code_entry
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.core.plurals import counted
from hyperfl_flwr.data.sample_format import title_of
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.metrics.images import Lpips, Similarity, similarity
from hyperfl_flwr.pages.figures import image_source
from hyperfl_flwr.pages.render import NOTHING, Settings, plain, write_page
from hyperfl_flwr.runs import manifest

AUGMENTED = (
    "The clients trained on randomly moved and flipped images: a private image is compared in that of these forms "
    "which is nearest, with reconstructions and controls alike. "
)

MALICIOUS = "The server is malicious in these attacks: it sends forged weights, which it made for each attack."


def measure(target: AttackedRound, findings: Mapping[str, AttackResult], lpips: Lpips | None = None) -> dict[str, Any]:
    """Return the content of audit.json; docs/privacy/audit.md defines each number.

    Args:
        target: Attacked round.
        findings: Result of each attack, by name.
        lpips: Computes LPIPS; None omits it.
    """
    config = target.config
    return {
        "method": config.method,
        "dataset": title_of(config.dataset),
        "threat": threat(target),
        "clients": len(target.clients),
        "summed": target.summed,
        "opened": target.opened,
        "by_neighbours": target.by_neighbours,
        "prior": target.prior,
        "malicious_server": target.malicious_server,
        "labels_known": target.labels_known,
        "samples_per_client": common(target.sizes),
        "batch_size": config.batch_size,
        "local_steps": common(target.steps),
        "trained": target.trained is not None,
        "augmented": target.augmented,
        "attacks": {name: _attack(target, finding, lpips) for name, finding in findings.items()},
        "settings": config.flat(),
        "code": code_entry(),
        "hardware": manifest.hardware(),
        "versions": versions(),
    }


def _attack(target: AttackedRound, finding: AttackResult, lpips: Lpips | None) -> dict[str, Any]:
    results = finding.results
    document: dict[str, Any] = {
        "title": finding.attack.title,
        "source": finding.attack.source,
        "iterations": common([result.iterations for result in results]),
        "seconds": sum(result.seconds for result in results),
        "labels_found": finding.labels_found,
        "findings": [dict(result.findings) for result in results],
        "nothing_to_read": [
            {"client": None if target.summed else client, "reason": result.nothing_to_read}
            for client, result in zip(target.clients, results, strict=False)
            if result.nothing_to_read
        ],
    }
    if finding.label_correlation:
        document["label_counts"] = _label_counts(finding)
    if not finding.comparisons:
        return document
    found = np.concatenate([comparison.matched.images for comparison in finding.comparisons])
    others = np.concatenate([comparison.unrelated.images for comparison in finding.comparisons])
    private = np.concatenate([comparison.matched.private for comparison in finding.comparisons])
    of_others = np.concatenate([comparison.unrelated.private for comparison in finding.comparisons])
    ours, control = similarity(found, private, lpips), similarity(others, of_others, lpips)
    return document | {
        "psnr": _statistics(ours.psnr),
        "ssim": _statistics(ours.ssim),
        "lpips": None if ours.lpips is None else _statistics(ours.lpips),
        "control": _controls(finding, control),
        "verdict": verdict(finding.comparisons),
        "images_recovered": number_recovered(finding.comparisons),
    }


def _controls(finding: AttackResult, control: Similarity) -> dict[str, Any]:
    """Return the controls of an attack's images: unrelated images, the mean ones, and those of the next client.

    Args:
        finding: Result of the attack.
        control: Similarity of the unrelated images.
    """
    return {
        "unrelated": {
            "psnr": _statistics(control.psnr),
            "ssim": _statistics(control.ssim),
            "lpips": None if control.lpips is None else _statistics(control.lpips),
            "images_ahead": number_by_chance(finding.comparisons),
        },
        "mean_image": {
            "psnr": _statistics(np.concatenate([comparison.mean_image for comparison in finding.comparisons]))
        },
        "class_means": {"psnr": _statistics(finding.class_means)},
        "next_client": {"images_recovered": number_recovered(finding.crossed)} if finding.crossed else None,
    }


def _label_counts(finding: AttackResult) -> dict[str, Any]:
    """Return the estimates by client, and their rank correlations with the truth; None if either is constant."""
    found = [None if math.isnan(value) else value for value in finding.label_correlation]
    known = [value for value in found if value is not None]
    return {
        "correlation": {"mean": float(np.mean(known)) if known else None, "per_client": found},
        "estimated": [
            None if result.label_counts is None else [round(float(count), 2) for count in result.label_counts]
            for result in finding.results
        ],
    }


def _statistics(values: NDArray[np.float64]) -> dict[str, Any]:
    """Return mean, median and each value; NaN (SSIM of images below 7 pixels) becomes None."""
    capped = np.minimum(values, MOST_DECIBELS)
    numbers = {"mean": float(np.mean(capped)), "median": float(np.median(capped))}
    return {
        **{name: None if math.isnan(number) else number for name, number in numbers.items()},
        "per_image": [None if math.isnan(value) else float(value) for value in capped],
    }


def table(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return column names and rows of the table of attacks that look for images, with their controls."""
    with_lpips = any(found.get("lpips") for found in document["attacks"].values())
    names = ["attack", "recovered", "PSNR, mean (median)", "SSIM", *(["LPIPS"] if with_lpips else [])]
    names += ["control: unrelated", "control: mean (class)", "iterations", "verdict"]
    rows = []
    for name, found in document["attacks"].items():
        if "psnr" not in found:
            continue
        others = found["control"]["unrelated"]
        rows.append(
            [
                f"{found['title']} ({name})",
                f"{found['images_recovered']} of {len(found['psnr']['per_image'])}",
                _mean_and_median(found["psnr"]),
                _mean_text(found["ssim"]),
                *([_mean_text(found["lpips"])] if with_lpips else []),
                f"{others['psnr']['mean']:.1f} dB, SSIM {_mean_text(others['ssim'])}",
                f"{found['control']['mean_image']['psnr']['mean']:.1f} dB "
                f"({found['control']['class_means']['psnr']['mean']:.1f})",
                span(each(found["iterations"], 1)) if found["iterations"] else NOTHING,
                found["verdict"],
            ]
        )
    return names, rows


def _markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = "|---|" + "---:|" * (len(names) - 2) + "---|"
    lines = ["| " + " | ".join(cells) + " |" for cells in (names, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def _mean_text(values: Mapping[str, Any] | None) -> str:
    return NOTHING if values is None or values["mean"] is None else f"{values['mean']:.2f}"


def _mean_and_median(values: Mapping[str, Any]) -> str:
    return f"{values['mean']:.1f} dB ({values['median']:.1f})"


def write_audit(
    target: AttackedRound, findings: Mapping[str, AttackResult], folder: Path, lpips: Lpips | None = None
) -> dict[str, Any]:
    """Write audit.json, audit.md, audit.png and audit.html to a folder; returns the content of audit.json."""
    document, rows = measure(target, findings, lpips), picture_rows(target, findings)
    heading = f"{document['method']} on {document['dataset']}: {document['threat']}"
    sentences = verdicts(document)
    facts, (names, cells) = _facts(document, _known(target, findings)), table(document)
    text = "\n".join(
        [
            f"# {heading}",
            "",
            facts,
            "",
            *(f"- {verdict}" for verdict in sentences.values()),
            "",
            _markdown(names, cells),
        ]
    )
    write_atomically(folder / "audit.json", json.dumps(document, indent=2).encode())
    write_atomically(folder / "audit.md", text.encode())
    draw_rows(rows).savefig(folder / "audit.png", dpi=100)
    write_page(
        folder / "audit.html",
        "audit.html",
        document=document,
        heading=heading,
        malicious=MALICIOUS if target.malicious_server else "",
        facts=facts,
        verdicts=sorted(
            ((name, *_verdict(document["attacks"][name]), verdict) for name, verdict in sentences.items()),
            key=lambda item: item[1] != "alarm",
        ),
        num_images=sum(each(document["samples_per_client"], document["clients"])),
        pictures=[_picture(row) for row in rows],
        names=names,
        rows=cells,
        found=Settings.of(document["settings"], default_settings(document["method"]), {}),
        circumstances_rows=[
            (name, plain(value)) for part in ("code", "hardware", "versions") for name, value in document[part].items()
        ],
    )
    return document


def _facts(document: Mapping[str, Any], known: str) -> str:
    state = "a trained model" if document["trained"] else "fresh parameters"
    malicious = f"{MALICIOUS} " if document["malicious_server"] else ""
    clients, samples = counted(document["clients"], "client"), each(document["samples_per_client"], 1)
    images = counted(samples[0], "image") if len(samples) == 1 else f"{span(samples)} images"
    return (
        f"{malicious}{clients} with {images} each, {state}. What leaves a client: "
        f"{METHODS[document['method']].sends}. {known} Reconstructions were assigned to the private images afterwards. "
        f"{AUGMENTED if document['augmented'] else ''}"
        f"Controls: as many unrelated images, and the mean image; in brackets that of the image's class, which anyone "
        f"who knows the label can make."
    )


def _verdict(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of an attack's notice and a short verdict."""
    if "verdict" in found:
        return "plain" if found["verdict"] == "recovered nothing" else "alarm", found["verdict"]
    share = found["labels_found"]
    if share is None and found["nothing_to_read"]:
        return "plain", "nothing to read"
    return "plain", "looked for no images" if share is None else f"found {100 * share:.0f} % of the labels"


def _picture(row: PictureRow) -> tuple[str, list[tuple[str, str, str]]]:
    """Return a row's label, and the source, description and caption of each of its images."""
    cells = []
    for number, image in enumerate(row.images, start=1):
        caption = "" if row.psnr is None else f"{row.psnr[number - 1]:.1f} dB"
        description = {
            "private": f"private image {number}",
            "unrelated": f"unrelated image compared with private image {number}",
        }
        text = description.get(row.label, f"reconstruction of private image {number} by {row.label}")
        cells.append((image_source(image), f"{text}, PSNR {caption}" if caption else text, caption))
    return row.label, cells


def _known(target: AttackedRound, findings: Mapping[str, AttackResult]) -> str:
    labels = ", the settings, and to find images the true labels" if target.labels_known else " and the settings"
    if target.by_neighbours:
        return f"The attacks had what the first and the last client received and sent{labels}."
    if target.malicious_server:
        what = "the sum of the clients' messages" if target.summed else "the server's messages"
        return f"The attacks had {what}, the settings, and public images of the same kind."
    if target.opened:
        return "The attacks had the mean that the server opened with secure sums, and the settings."
    if not target.summed:
        informed = [name for name, finding in findings.items() if finding.attack.needs_prior]
        also = f"; {', '.join(informed)} also had images of {target.prior}" if informed else ""
        return f"The attacks had the server's messages{labels}{also}."
    informed = [name for name, finding in findings.items() if finding.attack.gets_hidden]
    also = f"; {', '.join(informed)} also had the clients' activations, which single uploads reveal" if informed else ""
    return f"The attacks had the sum of the clients' messages and the settings{also}."
