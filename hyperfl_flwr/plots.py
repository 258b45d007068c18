"""Pictures of a run's metrics; readable in black and white."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hyperfl_flwr.recording import Record, read_manifest, read_metrics

Curve = tuple[list[int], list[float]]


def plot_run(path: Path) -> Path:
    """Draw accuracy, training loss and per-client accuracy of a run folder over its rounds.

    Returns:
        The picture, `plots/run.png` in the folder.
    """
    records = list(read_metrics(path))
    settings = read_manifest(path)["settings"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, loss, clients = figure.subplots(1, 3)
    figure.suptitle(f"{settings['method']} on {settings['dataset']}, {settings['num-clients']} clients")
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
    picture = path / "plots" / "run.png"
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=120)
    return picture


def plot_comparison(paths: dict[str, Path], picture: Path) -> None:
    """Draw own and aggregate accuracy of several run folders over their rounds, one line style per run."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for (name, path), style in zip(paths.items(), ("k-o", "k--s", "k:^", "k-.d"), strict=False):
        records = list(read_metrics(path))
        panels[0].plot(*_curve(records, "train", "own_accuracy"), style, markersize=3, mfc="white", label=name)
        panels[1].plot(
            *_curve(records, "aggregate", "aggregate_accuracy"), style, markersize=3, mfc="white", label=name
        )
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
