"""Pictures of a run's metrics; readable in black and white."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hyperfl_flwr.runs.run_data import RunData
from hyperfl_flwr.runs.run_directory import Record, read_manifest, read_metrics

MOST_LABELS = 60
"""Clients that are named below their bars."""

Curve = tuple[list[int], list[float]]


def plot_run(path: Path) -> Path:
    """Draw accuracy, training loss and per-client accuracy of a run folder over its rounds.

    Returns:
        The picture, `plots/run.png` in the folder.
    """
    picture = path / "plots" / "run.png"
    picture.parent.mkdir(exist_ok=True)
    run_figure(path).savefig(picture, dpi=120)
    return picture


def run_figure(path: Path) -> Figure:
    """Return the figure of `plot_run`."""
    records = list(read_metrics(path))
    manifest = read_manifest(path)
    settings = manifest["settings"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, loss, clients = figure.subplots(1, 3)
    figure.suptitle(f"{settings['method']} on {RunData.read(manifest).title}, {settings['num-clients']} clients")
    accuracy.plot(*_curve(records, "train", "own_accuracy"), "k-o", markersize=3, label="own (after local training)")
    accuracy.plot(
        *_curve(records, "aggregate", "aggregate_accuracy"), "k--s", markersize=3, mfc="white", label="aggregate"
    )
    _label(accuracy, "mean test accuracy of the clients")
    accuracy.legend(fontsize="small", loc="lower right")
    loss.plot(*_curve(records, "train", "train_loss"), "k-o", markersize=3)
    _label(loss, "training loss in nats")
    rounds, values = _curve(records, "client", "own_accuracy")
    clients.plot(rounds, values, "k_", alpha=0.5)
    _label(clients, "own test accuracy of each client")
    return figure


def clients_figure(accuracies: Sequence[float | None]) -> Figure:
    """Draw the clients' accuracies, sorted; a client without one is left out."""
    known = sorted((accuracy, client) for client, accuracy in enumerate(accuracies) if accuracy is not None)
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.bar(range(len(known)), [accuracy for accuracy, _ in known], color="0.6", edgecolor="k", linewidth=0.5)
    if len(known) <= MOST_LABELS:
        axes.set_xticks(range(len(known)), [str(client) for _, client in known], fontsize="small")
    axes.set_xlabel("client, from the lowest to the highest")
    axes.set_ylabel("own test accuracy")
    axes.grid(axis="y", alpha=0.3)
    return figure


def labels_figure(counts: Sequence[Sequence[int]]) -> Figure:
    """Draw the training samples of each class and client, counts [N, K], as areas."""
    figure = Figure(figsize=(10, 1.2 + 0.16 * len(counts[0])), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    most = max((number for row in counts for number in row), default=0) or 1
    points = [(client, label, number) for client, row in enumerate(counts) for label, number in enumerate(row)]
    clients, labels, sizes = zip(*[point for point in points if point[2]], strict=True)
    axes.scatter(clients, labels, s=[90 * size / most for size in sizes], c="k", linewidths=0)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_title(f"training samples; the largest dot is {most}", fontsize="medium")
    axes.grid(alpha=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return figure


def plot_comparison(paths: Mapping[str, Sequence[Path]], picture: Path) -> None:
    """Draw own and aggregate accuracy over the rounds.

    Args:
        paths: Run folders by name; those of one name are drawn in the same line style.
        picture: The file.
    """
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    curves = (("train", "own_accuracy"), ("aggregate", "aggregate_accuracy"))
    for (name, runs), style in zip(paths.items(), ("k-o", "k--s", "k:^", "k-.d"), strict=False):
        for number, run in enumerate(runs):
            records, label = list(read_metrics(run)), None if number else name  # one line of the legend for each name
            for panel, curve in zip(panels, curves, strict=True):
                panel.plot(*_curve(records, *curve), style, markersize=3, linewidth=1, mfc="white", label=label)
    _label(panels[0], "own accuracy (after local training)")
    _label(panels[1], "aggregate accuracy (as received)")
    panels[0].legend(fontsize="small", loc="lower right")
    figure.savefig(picture, dpi=120)


def _curve(records: list[Record], kind: str, name: str) -> Curve:
    rows = [record for record in records if record["kind"] == kind and name in record]
    return [row["round"] for row in rows], [row[name] for row in rows]


def _label(axes: Axes, title: str) -> None:
    axes.set_xlabel("round")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
