"""What is stated about a run's privacy, and the record of its releases."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import StateError
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.privacy.accounting import record_epsilon, record_noise
from hyperfl_flwr.runs import privacy_statement
from hyperfl_flwr.runs.planned_privacy import planned
from hyperfl_flwr.runs.privacy_statement import PrivacyStatement, statement_text
from hyperfl_flwr.runs.releases import FILE, SumRelease, read_releases, record_release


def release(number: int, crowd: int = 5) -> SumRelease:
    return SumRelease(round=number, noise="server", noise_multiplier=1.0, clip_norm=0.5, crowd=crowd)


def statement(folder: Path, *, sizes: tuple[int, ...] = (), **settings: Scalar) -> dict[str, Any]:
    """Return the entry of a run with some settings and, if given, numbers of samples."""
    counts = {"label_counts": {"train": [[size - 1, 1] for size in sizes]}} if sizes else {}
    manifest = {"settings": default_settings() | settings, "resolved": {}, **counts}
    return PrivacyStatement.of(folder, manifest).entry()


def test_releases_are_kept_in_their_order(tmp_path: Path) -> None:
    assert read_releases(tmp_path) == []
    for number in (1, 2, 2):
        record_release(tmp_path, release(number))
    assert read_releases(tmp_path) == [release(1), release(2), release(2)]


def test_an_incomplete_line_is_no_release(tmp_path: Path) -> None:
    """The process was killed before the line was on disk, so nothing was released; the next line begins anew."""
    record_release(tmp_path, release(1))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"round": 2, "noi')
    assert read_releases(tmp_path) == [release(1)]
    record_release(tmp_path, release(2))
    assert read_releases(tmp_path) == [release(1), release(2)]


@pytest.mark.parametrize("line", ["{}", '{"round": 1}', "no json", '{"round": 1, "color": 2}'])
def test_a_damaged_line_is_an_error(line: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f"{line}\n")
    with pytest.raises(StateError, match=r"line 1 of .*privacy.jsonl is damaged"):
        read_releases(tmp_path)


@pytest.mark.parametrize(("releases", "suffices"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_record_that_lacks_releases_is_an_error(releases: int, tmp_path: Path, *, suffices: bool) -> None:
    """Two rounds had clients that finished; a round without one releases nothing."""
    rows = [{"kind": "train", "round": number, "clients": clients} for number, clients in ((1, 3), (2, 0), (3, 1))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(releases):
        record_release(tmp_path, release(number))
    given: dict[str, Scalar] = {
        "privacy.unit": "client", "privacy.clip-norm": 0.5, "privacy.noise-multiplier": 1.0, "privacy.noise": "server",
    }  # fmt: skip
    if suffices:
        assert statement(tmp_path, **given)["horizon"] == releases
        return
    with pytest.raises(StateError, match=rf"has {releases} releases, but clients were trained in 2 rounds.*restore"):
        statement(tmp_path, **given)


def test_the_least_crowd_is_stated(tmp_path: Path) -> None:
    for number, crowd in enumerate((20, 18, 19), 1):
        record_release(tmp_path, release(number, crowd))
    given: dict[str, Scalar] = {
        "privacy.unit": "client", "privacy.clip-norm": 0.5, "privacy.noise-multiplier": 1.0, "privacy.noise": "server",
    }  # fmt: skip
    entry = statement(tmp_path, **given)
    assert (entry["crowd"], entry["horizon"], entry["accountant"]) == (18, 3, "analytic Gaussian")
    text = statement_text(entry)
    assert text.startswith(f"epsilon {entry['epsilon']:.2f} at delta 1e-05 of clients over 3 releases, in sums of at ")
    assert "at least 18 clients; not covered: metrics and numbers of samples; who takes part" in text
    assert "what the server sees, which adds the noise" in text
    assert "the choice of settings on the same data; a client's own personalized model" in text


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, []),
        ({"dp.epsilon": 4.0}, ["planned epsilon 4.00 at delta 1e-05 of records over 10 rounds"]),
        ({"privacy.noise-multiplier": 1.0}, ["planned epsilon 17.86 at delta 1e-05 of clients over 10 rounds"]),
        ({"privacy.noise-multiplier": 0.0}, ["planned epsilon inf at", "warning: the planned epsilon is infinite"]),
        (
            {"privacy.noise-multiplier": 1.0, "privacy.delta": 0.09},
            ["planned epsilon", "warning: privacy.delta = 0.09 is above 1 / 20 clients"],
        ),
    ],
)
def test_what_a_run_will_spend_is_known_before_it(settings: dict[str, Scalar], found: list[str]) -> None:
    unit = {"privacy.unit": "client", "privacy.clip-norm": 1.0} if "privacy.noise-multiplier" in settings else {}
    base: dict[str, Scalar] = {"num-rounds": 10, "num-clients": 20}
    lines = planned(RunConfig.from_flat(default_settings() | base | unit | settings))
    assert len(lines) == len(found)
    assert all(part in line for part, line in zip(found, lines, strict=True))


@pytest.mark.parametrize(("method", "holds"), [("fedrep", False), ("ppsgd", False), ("fedavg", True)])
def test_no_epsilon_is_planned_for_heads_without_noise(method: str, holds: bool) -> None:
    given: dict[str, Scalar] = {"method": method, "dp.epsilon": 4.0, "dp.heads": "published"}
    (line,) = planned(RunConfig.from_flat(default_settings() | given))
    assert ("planned epsilon 4.00" in line) is holds
    assert ("no epsilon of records holds" in line) is not holds


def test_only_secure_sums_count_honest_clients(tmp_path: Path) -> None:
    record_release(tmp_path, release(1, 3))
    given: dict[str, Scalar] = {
        "privacy.unit": "client", "privacy.clip-norm": 0.5, "privacy.noise-multiplier": 1.0, "privacy.noise": "sum",
    }  # fmt: skip
    assert "in sums of at least 3 honest clients" in statement_text(statement(tmp_path, **given))


@pytest.mark.parametrize(("rounds", "noise"), [(2, 2.367), (4, 3.24)])
def test_the_client_with_the_fewest_samples_needs_the_largest_noise(tmp_path: Path, rounds: int, noise: float) -> None:
    """The client with 600 samples, the fewest, needs the largest noise: 600 steps need the known 2.367."""
    given: dict[str, Scalar] = {
        "method": "fedavg", "dp.epsilon": 4.0, "batch-size": 50, "local-epochs": 25, "num-rounds": rounds,
        "num-clients": 2,
    }  # fmt: skip
    entry = statement(tmp_path, sizes=(700, 600, 3), **given)  # the last client is a novel one
    assert entry["noise_multiplier"] == pytest.approx(noise, abs=0.01)
    assert entry["epsilon"] == pytest.approx(4.0, abs=0.01)
    assert entry["epsilon"] <= 4
    assert entry == entry | {"unit": "record", "delta": 1e-5, "horizon": rounds, "crowd": None, "reason": None}
    assert statement_text(entry).startswith(f"epsilon 4.00 at delta 1e-05 of records over {rounds} rounds; not")
    unknown = statement(tmp_path, **given)
    assert (unknown["epsilon"], unknown["noise_multiplier"]) == (4.0, None)


def lines(folder: Path, *rows: tuple[int, int, int, int]) -> None:
    """Write metrics.jsonl with rows of (round, client, number of samples, noisy steps so far)."""
    kinds = [{"kind": "train", "round": number} for number in sorted({row[0] for row in rows})]
    clients = [
        {"kind": "client", "round": number, "client": client, "num_examples": size, "private_steps": steps}
        for number, client, size, steps in rows
    ]
    found = sorted([*kinds, *clients], key=lambda line: (line["round"], line["kind"] != "train"))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))


FOUR_ROUNDS: dict[str, Scalar] = {
    "method": "fedavg", "dp.epsilon": 4.0, "batch-size": 50, "local-epochs": 1, "num-rounds": 4, "num-clients": 2,
}  # fmt: skip


def test_the_largest_number_of_reported_steps_is_stated(tmp_path: Path) -> None:
    """48 and 44 steps were planned for 600 and 550 samples; the second client has taken twice as many."""
    lines(tmp_path, (3, 0, 600, 36), (3, 1, 550, 33), (4, 0, 600, 48), (4, 1, 550, 88))
    entry = statement(tmp_path, **FOUR_ROUNDS)
    noise = record_noise(4.0, 1e-5, 50 / 550, 44)
    assert entry["epsilon"] == record_epsilon(noise, 50 / 550, 88, 1e-5) > 5
    assert entry["noise_multiplier"] == noise
    assert not any("delivered twice" in each for each in entry["not_covered"])
    lines(tmp_path, (4, 0, 600, 48), (4, 1, 550, 22))  # a client that has missed rounds
    assert statement(tmp_path, **FOUR_ROUNDS)["epsilon"] == 4.0
    lines(tmp_path, (4, 0, 600, 48), (4, 1, 550, 10**9))
    entry = statement(tmp_path, **FOUR_ROUNDS)
    assert entry["epsilon"] is None
    assert "noisy steps, its node says, where" in entry["reason"]


def test_repeated_rounds_count_for_clients_that_do_not_report_at_the_end(tmp_path: Path) -> None:
    """Client 1 was last seen in round 1, and may have taken part in the three rounds that were repeated."""
    lines(tmp_path, (1, 0, 600, 12), (1, 1, 600, 12), (4, 0, 600, 48))
    manifest = {"settings": default_settings() | FOUR_ROUNDS, "resolved": {}, "resumed": [{"repeated_rounds": 3}]}
    entry = PrivacyStatement.of(tmp_path, manifest).entry()
    assert entry["epsilon"] == record_epsilon(record_noise(4.0, 1e-5, 1 / 12, 48), 1 / 12, 7 * 12, 1e-5) > 5
    assert entry["horizon"] == 7
    assert "messages that were delivered twice, which only the nodes count" in statement_text(entry)


def test_repeated_rounds_of_unknown_clients_have_no_epsilon(tmp_path: Path) -> None:
    """Without numbers of samples, as in a deployment with secure sums."""
    manifest = {"settings": default_settings() | FOUR_ROUNDS, "resolved": {}, "resumed": [{"repeated_rounds": 0}]}
    assert PrivacyStatement.of(tmp_path, manifest).entry()["epsilon"] == 4.0
    manifest["resumed"] = [{"repeated_rounds": 1}, {"repeated_rounds": 2}]
    text = statement_text(PrivacyStatement.of(tmp_path, manifest).entry())
    assert text.startswith("no epsilon of records over 7 rounds: 3 rounds were repeated with other noise")


@pytest.mark.parametrize(("method", "holds"), [("fedrep", False), ("hyperfl-frozen", False), ("fedavg", True)])
def test_published_heads_have_no_epsilon(tmp_path: Path, method: str, *, holds: bool) -> None:
    """A method without a private classifier has none to publish."""
    entry = statement(tmp_path, **{"method": method, "dp.epsilon": 4.0, "dp.heads": "published"})
    assert (entry["epsilon"] is not None) == holds
    assert (entry["reason"] is None) == holds
    if not holds:
        assert "the classifier moves the gradients of all other records" in statement_text(entry)


def test_a_run_of_an_earlier_version_has_a_statement(tmp_path: Path) -> None:
    """Its manifest lacks the settings."""
    entry = PrivacyStatement.of(tmp_path, {"settings": {"method": "fedavg"}}).entry()
    assert (entry["unit"], entry["epsilon"]) == ("none", None)
    assert statement_text(entry) == ""
    assert json.loads(json.dumps(entry)) == entry


def test_the_steps_taken_have_the_largest_epsilon_of_any_client() -> None:
    """Not that of the client with the largest share of its planned steps, nor that with the most samples."""
    plan = privacy_statement._Plan(epsilon=10.0, delta=1e-3, rounds=8, epochs=1, batch=50)
    sizes = {0: 30, 1: 120, 2: 400, 3: 60, 4: 400}
    for rounds in ((2, 2, 2, 2, 2), (4, 2, 1, 3, 1), (1, 1, 1, 5, 2)):
        steps = {client: number * plan.steps_of(sizes[client]) for client, number in enumerate(rounds)}
        each = {
            client: record_epsilon(plan.noise(size), min(1.0, 50 / size), steps[client], 1e-3)
            for client, size in sizes.items()
        }
        assert plan.of_taken(sizes, steps)[0] == max(each.values())
        assert len(set(each.values())) > 2
