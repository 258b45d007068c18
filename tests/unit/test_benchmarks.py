"""The benchmark at a tiny size: its programs compute the same, and it measures copies and memory correctly."""

import dataclasses
import importlib
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from hyperfl_flwr.protocol.packing import pack_arrays

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="needs a checkout of the project"),
]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def tiny(method, shape):
    workload = importlib.import_module("benchmarks.workload")
    return workload, workload.Workload(
        method=method, shape=shape, train=24, test=10, batch_size=12, epochs=2, clients=2
    )


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("method", ["fedavg", "hyperfl"])
@pytest.mark.extended
def test_plain_loops_train_as_the_project_does(method, shape, tmp_path):
    """A client's round of four steps and three rounds of two clients give equal losses in both programs (float32)."""
    workload, work = tiny(method, shape)
    ours, plain = (workload.client_round(work, program, tmp_path / program)() for program in ("ours", "plain"))
    assert ours == pytest.approx(plain, rel=1e-4)
    dataset = tmp_path / "images.npz"
    workload.write_dataset(work, dataset)
    plain = workload.plain_rounds(work, 3, dataset)
    ours = workload.in_process_rounds(work, 3, dataset, tmp_path / "run")
    assert ours.losses == pytest.approx(plain.losses, rel=1e-4)
    for rounds in (ours, plain):
        assert len(rounds.wall) == len(rounds.cpu) == 2
        assert min(rounds.wall) > 0


@pytest.mark.extended
def test_a_record_gives_the_tables_of_what_was_measured(monkeypatch):
    """A client's round is measured in a plain loop and in the project, each in a separate process; a row for each.

    The numbers go through the record's JSON, as those of every section do, and the tables and targets stay the same.
    """
    measure, records, rounds, sections = (
        importlib.import_module(f"benchmarks.{name}") for name in ("measure", "records", "rounds", "sections")
    )
    monkeypatch.setattr(rounds, "CLIENT_VARIANTS", (rounds.CLIENT_VARIANTS[2], rounds.CLIENT_VARIANTS[4]))
    assert {variant.program for variant in rounds.CLIENT_VARIANTS} == {"plain", "ours"}
    _, work = tiny("hyperfl", (1, 28, 28))
    _, small = tiny("hyperfl-frozen", (1, 28, 28))
    three = dataclasses.replace(small, clients=3)
    clients = rounds.measure_clients(work, 1, lambda _: None)
    assert [one.variant for one in clients.timings] == list(rounds.CLIENT_VARIANTS)
    federated = [dataclasses.replace(clients.timings[0], variant=variant) for variant in rounds.FEDERATED_VARIANTS]
    secure_sums = importlib.import_module("benchmarks.secure_sums")
    found = {
        "client-rounds": [clients],
        "federated-rounds": [rounds.FederatedRounds(work=work, size=1, timings=federated)],
        "secure-sums": secure_sums.SecureSums(
            costs=[measure.measure_secure(small, 4, lambda _: None)],
            rounds=[measure.measure_secure_rounds(three, 2, lambda _: None)],
        ),
        "noisy-steps": [measure.measure_private(work, "lenet", 1, lambda _: None)],
        "method-rounds": importlib.import_module("benchmarks.method_rounds").measure_methods(
            work, ("fedavg", "pfedhn"), lambda _: None
        ),
    }
    shown = {}
    for name, measured in found.items():
        section = sections.SECTIONS[name]
        record = records.new_record("command", "0" * 40, section.kind.dump_python(measured, mode="json"))
        read = section.kind.validate_python(records.Record.model_validate_json(record.model_dump_json()).measured)
        assert read == measured
        shown[name] = "\n\n".join(section.tables(read))
        assert shown[name] == "\n\n".join(section.tables(measured))
    for variant in rounds.FEDERATED_VARIANTS:
        assert shown["federated-rounds"].count(f"| {variant.name} |") == 1
        assert shown["client-rounds"].count(f"| {variant.name} |") == (variant in rounds.CLIENT_VARIANTS)
    assert "| hyperfl-frozen | 3 | " in shown["secure-sums"]
    assert "| lenet | 1x28x28 | " in shown["noisy-steps"]
    assert re.findall(r"^\| `(\S+)` \|", shown["method-rounds"], re.MULTILINE) == ["fedavg", "pfedhn"]
    fedavg, pfedhn = found["method-rounds"].rounds
    assert min(fedavg.cpu, fedavg.ratio, pfedhn.private) > 0


def test_the_network_of_many_arrays():
    """It trains as a network of one's own does: its last module with parameters is the classifier."""
    network = importlib.import_module("benchmarks.many_arrays").build((1, 8, 8), 10)
    assert len(network.state_dict()) == 64
    assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert list(network.state_dict())[-1] == "classifier.bias"


def test_accuracies_of_the_quickstart():
    """The tables have each run, the spread over the seeds, and the runs with older instructions."""
    quickstart = importlib.import_module("benchmarks.quickstart")
    accuracies = {("AVX512", 0): 0.9, ("AVX512", 1): 0.8, ("AVX2", 0): 0.9, ("AVX2", 1): 0.78}
    runs = [
        quickstart.QuickstartRun(
            instructions=instructions, method=method, learning_rate=0.1, seed=seed, personalized=value, aggregate=0.5
        )
        for method in quickstart.METHODS
        for (instructions, seed), value in accuracies.items()
    ]
    assert quickstart.largest_difference(runs) == pytest.approx(0.02)
    page = "\n\n".join(quickstart.quickstart_tables(runs))
    assert "| fedavg | 0.1 | 1 | 80.0 | 50.0 |" in page
    assert "| fedavg | 85.0 (80.0 to 90.0) | 50.0 (50.0 to 50.0) |" in page
    assert "| AVX2 | 90.0 (50.0) | 78.0 (50.0) |" in page


def test_one_section_is_measured_at_a_time(monkeypatch, capsys, tmp_path):
    """Its tables are printed with the command that repeats them, and its record is written where sizes are usual."""
    main, records, sections, transport = (
        importlib.import_module(f"benchmarks.{name}") for name in ("__main__", "records", "sections", "transport")
    )
    step = transport.Step(name="pack", copies=1.0, seconds=0.0123)
    section = dataclasses.replace(
        sections.SECTIONS["transport"], measure=lambda sizes, note: [step], options=("repetitions",)
    )
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(main, "SECTIONS", {"transport": section})
    main.main(["transport", "--quick"])
    assert "`python -m benchmarks transport --quick --repetitions 2`; commit " in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    main.main(["--repetitions", "4"])
    assert "| pack | 1.00 | 12.3 |" in capsys.readouterr().out
    record = records.read_record("transport")
    assert record.command == "python -m benchmarks transport --repetitions 4"
    assert section.kind.validate_python(record.measured) == [step]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["round"], "there is no section round; choose from quickstart, "),
        (["transport", "--rounds", "2"], "--rounds must be at least 3, got 2"),
        (["deployed-load", "--quick"], "deployed-load has no quick version"),
    ],
)
def test_what_cannot_be_measured(words, message, capsys):
    main = importlib.import_module("benchmarks.__main__")
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "records").glob("*.json")), ids=lambda file: file.stem)
def test_records_have_a_commit_without_changes(file):
    """The command of each is that of its section."""
    record = importlib.import_module("benchmarks.records").read_record(file.stem)
    assert re.fullmatch(r"[0-9a-f]{40}", record.commit)
    assert record.command.startswith(f"python -m benchmarks {file.stem}")
    assert "--quick" not in record.command


@pytest.mark.extended
def test_copies_of_transport():
    """Packing takes one copy of the arrays and reading none. Reducing takes four or three.

    The server holds its sum in float64 and one reply, which is a sum of five clients (float64) or one client's arrays.
    """
    transport = importlib.import_module("benchmarks.transport")
    _, work = tiny("hyperfl", (1, 28, 28))
    steps = transport.measure_transport(dataclasses.replace(work, clients=10))
    assert [round(step.copies, 1) for step in steps] == [1.0, 0.0, 4.0, 3.0]


def test_costs_of_secure_sums():
    """A real step of four nodes is opened; a node sends its parameters, four boxes of 144 bytes, and its answer."""
    secure_sums = importlib.import_module("benchmarks.secure_sums")
    workload, work = tiny("hyperfl-frozen", (1, 28, 28))
    cost = secure_sums.measure_secure_sums(work, 4)
    assert (cost.nodes, cost.parameters, cost.missing) == (4, 115_776, 0)
    plain = pack_arrays(workload.initial_arrays(work)).count_bytes()
    assert 0 < round(cost.up * plain) - 4 * cost.parameters - 4 * 144 - cost.answer < 500
    assert 0 < cost.answer < cost.question
    assert min(cost.node, cost.server, cost.server_missing) > 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_private_memory_is_what_was_written():
    """50 MB of newly written memory are counted, within the 10 % that other allocations may take."""
    memory = importlib.import_module("benchmarks.memory")
    before = memory.private_memory(os.getpid())
    with mmap.mmap(-1, 50_000_000, mmap.MAP_PRIVATE) as block:
        block.write(b"x" * len(block))
        assert memory.private_memory(os.getpid()) - before == pytest.approx(len(block), rel=0.1)
    assert memory.private_memory(2**30) == 0
    assert memory.cpu_seconds([os.getpid()]) > 0
    assert 0 < memory.proportional_memory([os.getpid()]) < 2 * memory.private_memory(os.getpid()) + 1e9
    assert memory.proportional_memory([2**30]) == 0


def test_the_parts_of_a_deployed_round():
    """The first message is not counted; the parts of the second end at the lines that Flower logs."""
    deployed_round = importlib.import_module("benchmarks.deployed_round")
    steps = deployed_round.STEPS
    first = [(second, text) for second, text in enumerate(steps.values())]
    moments = {"taken": 10, "begun": 11, "loading": 13, "answered": 17, "sending": 18, "sent": 20}
    second = [(moments[step], f"INFO: {text} (ID: 1)") for step, text in steps.items()]
    other = (12, "INFO: something else")
    (parts,) = deployed_round.divided([*first, second[0], other, *second[1:]], [3.0])
    assert sorted(parts) == sorted(deployed_round.PARTS)
    assert parts == {"waiting": 5, "begun": 1, "loading": 2, "imports": 1.0, "clients": 3.0, "sending": 1, "sent": 2}


@pytest.mark.extended
def test_costs_of_many_clients():
    """A run of forty clients has private state of those that a round has drawn, and all of its phases take time."""
    many_clients = importlib.import_module("benchmarks.many_clients")
    case = many_clients.Case(method="hyperfl", clients=40, engine="in-process", end="drawn")
    cost = many_clients.measure(case)
    assert min(cost.start, cost.round, cost.last, cost.evaluation, cost.rest) > 0
    assert 30 < cost.entries <= 41  # with the record of what uploads release
    assert cost.state > 30 * 43_600 * 4  # the generated weights
    assert cost.manifest < 100_000


def test_the_robust_rules_are_measured():
    """Five nodes with FedAvg's model: a row for each rule, which allocates at least its result."""
    robust_rules = importlib.import_module("benchmarks.robust_rules")
    _, work = tiny("fedavg", (1, 28, 28))
    found = robust_rules.measure_rules(work, 5, 1, lambda _: None)
    head, table = robust_rules.rule_tables(found)
    assert head.startswith("5 nodes with 117,066 parameters")
    assert re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE) == list(robust_rules.RULES)
    assert min(cost.memory for cost in found.costs) >= 4 * 117_066
