"""One self-contained HTML page about a run: what it was, what it reached, and what travelled."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hyperfl_flwr.app.methods import client_of
from hyperfl_flwr.config.run_config import default_settings
from hyperfl_flwr.core.errors import RunDirectoryError
from hyperfl_flwr.core.method import Method
from hyperfl_flwr.core.storage import write_atomically
from hyperfl_flwr.methods import METHODS
from hyperfl_flwr.runs.novel_results import means, read_novel
from hyperfl_flwr.runs.plots import clients_figure, labels_figure, run_figure
from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import read_manifest, trained_settings
from hyperfl_flwr.runs.summary import summarise

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #bbb; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } .changed { font-weight: 600; } .columns { columns: 2; }
"""


def write_report(path: Path, output: Path | None = None) -> Path:
    """Write the page.

    Args:
        path: A run folder with at least one recorded round.
        output: The file; None is `report.html` in the run folder.

    Returns:
        The file.

    Raises:
        RunDirectoryError: If the folder is no run folder, or no round was recorded.
    """
    manifest = read_manifest(path)
    try:
        summary = summarise(path)
    except ValueError as error:
        raise RunDirectoryError(f"{error}, so there is nothing to report yet") from None
    method = METHODS[summary["method"]]
    title = f"{method.title[0].upper()}{method.title[1:]}"
    parts = [
        f"<h1>{_text(summary['method'])} on {_text(summary['dataset'])}</h1>",
        f"<p>{_text(title)} ({_text(method.paper)}). {_text(_state(manifest, summary))}</p>",
        "<h2>Result</h2>",
        _rows(_result(path, summary)),
        _image(run_figure(path), "accuracy and training loss over the rounds"),
        "<h2>Clients</h2>",
        _image(clients_figure(summary["test_accuracy_per_client"]), "own accuracy of each client, sorted"),
        *_labels(manifest),
        "<h2>What travelled</h2>",
        f"<p>{_text(_groups(method))}</p>",
        _rows(_travelled(summary)),
        "<h2>Settings</h2>",
        "<p>Bold where they differ from the defaults; in brackets what <i>auto</i> became.</p>",
        _settings(
            RunData.read(manifest).named_in(manifest["settings"]),
            trained_settings(manifest) | manifest.get("resolved", {}),
        ),
        "<h2>Circumstances</h2>",
        _rows([(name, _plain(value)) for name, value in _circumstances(manifest)]),
    ]
    head = f"<meta charset='utf-8'><title>{_text(summary['method'])}</title><style>{STYLE}</style>"
    page = f"<!doctype html><html lang='en'><head>{head}</head><body>" + "\n".join(parts) + "</body></html>\n"
    file = output or path / "report.html"
    write_atomically(file, page.encode())
    return file


def _state(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    state = {"completed": "The run is complete", "running": "The run goes on"}.get(
        manifest["status"], f"The run has {manifest['status']}"
    )
    problem = f" {manifest['problem']}" if manifest["problem"] else ""
    clients = f"{summary['num_clients']} clients on {summary['num_nodes']} nodes"
    return f"{state}: {summary['rounds']} rounds, {clients}.{problem}"


def _result(path: Path, summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    names = {
        "test_accuracy": "own accuracy (after local training), mean over the clients",
        "test_accuracy_aggregate": "aggregate accuracy (as received), mean over the clients",
        "test_accuracy_std": "standard deviation of own accuracy over the clients",
        "test_accuracy_worst_decile": "own accuracy of the worst tenth of the clients",
        "test_accuracy_worst": "own accuracy of the worst client",
    }
    for key, name in names.items():
        value = summary[key]
        yield name, "none" if value is None else f"{100 * value:.2f} %"
    of_all = {
        "global_test_accuracy": "own accuracy on all test data of the data set",
        "global_test_accuracy_aggregate": "aggregate accuracy on all test data of the data set",
    }
    for key, name in of_all.items():
        if summary[key] is not None:
            yield name, f"{100 * summary[key]:.2f} %"
    for (way, corruption), found in means(read_novel(path)).items():
        yield f"novel clients, {way}" + ("" if corruption == "none" else f", {corruption}"), f"{found} %"
    yield "seconds per round (median)", f"{summary['seconds_per_round']:.2f}"
    yield "peak memory", f"{summary['peak_memory_mb']:.0f} MB"


def _travelled(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    yield "a client's payload to the server, per round", f"{summary['bytes_up_per_client_round'] / 1e6:.3f} MB"
    yield "a client's payload from the server, per round", f"{summary['bytes_down_per_client_round'] / 1e6:.3f} MB"
    yield "on the wire between server and nodes, per round", f"{summary['bytes_on_wire_per_round'] / 1e6:.3f} MB"


def _groups(method: Method) -> str:
    shared = ", ".join(f"{name} ({reduction.value})" for name, reduction in client_of(method.name).shared.items())
    private = ", ".join(client_of(method.name).private)
    return (
        f"Leaves a client: {method.leaves}. Shared parameter groups, and how the server reduces them: "
        f"{shared or 'none'}. Groups that never leave the node: {private or 'none'}."
    )


def _labels(manifest: Mapping[str, Any]) -> list[str]:
    """Return the label distribution, which only a simulation's manifest holds."""
    if "label_counts" not in manifest:
        return ["<p>The nodes of a deployment do not tell their label distributions.</p>"]
    figure = labels_figure(manifest["label_counts"]["train"])
    return [_image(figure, "training samples of each class and client")]


def _circumstances(manifest: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    yield "start", manifest["start"]
    yield "end", manifest["end"]
    yield "resumed", f"{len(manifest['resumed'])} times"
    yield from manifest["code"].items()
    yield from manifest["hardware"].items()
    yield from manifest["versions"].items()


def _settings(settings: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    defaults = default_settings()
    lines = []
    for key, value in settings.items():
        style = " class='changed'" if value != defaults.get(key) else ""
        became = resolved.get(key, "auto")
        shown = _plain(value) if value != "auto" or became == "auto" else f"auto ({_plain(became)})"
        lines.append(f"<tr{style}><td>{_text(key)}</td><td>{_text(shown)}</td></tr>")
    return f"<div class='columns'><table>{''.join(lines)}</table></div>"


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{_text(name)}</td><td class='number'>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _image(figure: Figure, description: str) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    data = base64.b64encode(stream.getvalue()).decode()
    return f"<p><img alt='{_text(description)}' src='data:image/png;base64,{data}'></p>"


def _plain(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _text(text: str) -> str:
    return html.escape(text)
