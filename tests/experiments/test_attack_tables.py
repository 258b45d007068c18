"""What the pages say of single cells of the studies of attacks, and of the checks of a node's owner."""

from typing import Any

from benchmarks import node_checks as checks
from scripts import attack_tables as tables


def found(number: int, verdict: float, **others: Any) -> dict[str, Any]:
    return {
        "images_recovered": number, "images": 60, "recovered": verdict, "psnr": 20.26, "psnr_median": 19.94,
        "control_psnr": 12.04, **others,
    }  # fmt: skip


def test_images_of_each_attack_are_bold_unless_chance_explains_them() -> None:
    """An attack that a cell lacks, of one or of several, was refused."""
    both = {"strongest": "imprint", "attacks": {"imprint": found(42, 1.0), "trap-weights": found(7, 0.0)}}
    assert tables.found_by("imprint")(both) == "**42** (19.9; 12.0)"
    assert tables.found_by("trap-weights")(both) == "7 (19.9; 12.0)"
    alone = found(3, 0.5, strongest="trap-weights")
    assert tables.found_by("trap-weights")(alone) == "**3** (19.9; 12.0)"
    assert tables.found_by("imprint")(alone) == "refused"


def test_clients_are_counted_with_the_control_of_the_next_one() -> None:
    assert tables.clients_read(found(6, 0.5, next_client_images_recovered=3)) == "6 (3)"
    assert tables.clients_read(found(1, 0.5)) == "1"
    assert tables.clients_read({"labels_found": None, "strongest": "fishing"}) == "nothing to read"


def test_a_reconstruction_has_its_control_and_its_verdict() -> None:
    assert tables.reconstruction(found(4, 1.0)) == "20.3 [12.0]"
    assert tables.recovered(found(4, 0.5)) == "recovered some: 4 of 60"


def test_a_reconstruction_is_bold_where_images_are_recovered() -> None:
    assert tables.similarity(found(4, 0.5, ssim=0.514)) == "**20.3** (0.51) [12.0]"
    assert tables.similarity(found(4, 0.0, ssim=-0.004)) == "20.3 (0.00) [12.0]"
    assert tables.number_recovered(found(4, 0.5)) == "20.3 (4)"
    assert tables.recovered_of(found(4, 0.5)) == "4 of 60"


def test_values_above_a_nodes_limits_are_bold_and_what_is_not_measured_is_empty() -> None:
    """`max-change` is 1, and the limit itself is not above it."""
    assert checks.LIMITS["change"] == 1.0
    networks = {"at the limit": {"change": 1.0, "rare": 0.125}, "above": {"change": 1.004, "duplicates": 0.0}}
    measured = checks.CheckedNetworks(honest={"fedavg": {}}, few_classes={}, forged=networks, seconds={"`cnn`": 0.0308})
    honest, _, forged, time = (table.splitlines() for table in checks.check_tables(measured))
    names = [name.strip() for name in forged[0].split("|")[1:-1]]
    rows = [dict(zip(names, [cell.strip() for cell in line.split("|")[1:-1]], strict=True)) for line in forged[2:]]
    assert [row["change"] for row in rows] == ["1.00", "**1.00**"]
    assert [row["duplicates"] for row in rows] == ["", "0.00"]
    assert [row["rare"] for row in rows] == ["0.12", ""]
    assert set(honest[2].split("|")[2:-1]) == {"  "}
    assert time[2] == "| `cnn` | 31 |"
