"""The audit: real messages in, images with controls out, and no verdict beyond the measurements."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hyperfl_flwr
from hyperfl_flwr.attacks.readout import read_out
from hyperfl_flwr.attacks.scoring import verdict
from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import record_round, recorded_round
from hyperfl_flwr.audit.report import write_audit
from hyperfl_flwr.audit.sentences import sentence
from hyperfl_flwr.cli.main import cli
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.contract.base import SMALL, Federate
from hyperfl_flwr.contract.grids import Settings
from hyperfl_flwr.core.errors import ConfigError, RunDirectoryError, StateError
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.launch.warnings import leak_warnings, noise_warnings
from hyperfl_flwr.models.hypernetwork import common_embedding
from hyperfl_flwr.runs.observation import load_observation, save_observation
from hyperfl_flwr.runs.result_directory import result_directory
from hyperfl_flwr.runs.run_directory import read_metrics, settings_of

METHODS_WITH_UPLOADS = ["fedavg", "fedrep", "hyperfl", "hyperfl-frozen", "pfedhn", "pfedhn-pc", "it-pfl"]


def settings(**changes: object) -> Settings:
    own = {"batch-size": 1, "local-epochs": 1, "num-clients": 20}
    return default_settings() | SMALL | own | {key.replace("_", "-"): value for key, value in changes.items()}


@pytest.mark.parametrize("method", METHODS_WITH_UPLOADS)
def test_a_recorded_round_is_what_each_client_sent(method: str, federate: Federate) -> None:
    """Only clients 1 and 3 in round 2 are recorded, with different replies, and the losses are as without recording."""
    run = federate(method, **{"audit.clients": "1,3", "audit.rounds": "2"})
    names = sorted(path.name for path in (run / "observations").iterdir())
    assert names == ["round-000002-client-00001.npz", "round-000002-client-00003.npz"]
    one, three = (load_observation(run / "observations" / name) for name in names)
    assert (one.client, three.client, one.round) == (1, 3, 2)
    assert one.num_examples == 40
    key = next(key for key in one.reply if key.endswith("weight"))
    assert not np.array_equal(one.reply[key], three.reply[key])
    assert np.isfinite(one.reply[key]).all()
    plain = federate(method)
    assert not (plain / "observations").exists()
    losses = [
        [row["personalized_loss"] for row in read_metrics(each) if row["kind"] == "train"] for each in (run, plain)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_one_client_after_another_gives_the_mean_that_the_server_uses(federate: Federate) -> None:
    """With all clients recorded, the example-weighted mean of their replies is the next broadcast."""
    run = federate("fedavg", num_rounds=3, **{"audit.clients": "all", "audit.rounds": "1,2"})
    first = [load_observation(run / "observations" / f"round-000001-client-{client:05d}.npz") for client in range(5)]
    second = load_observation(run / "observations" / "round-000002-client-00000.npz")
    total = sum(each.num_examples for each in first)
    for key, value in second.received.items():
        mean = sum(each.num_examples / total * each.reply[key].astype(np.float64) for each in first)
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)


def test_the_server_reads_the_embedding_off_a_real_upload(tmp_path: Path) -> None:
    """After one step on one image, the real messages reveal v, the clients' common embedding, which is private."""
    target = make_attacked_round(settings(method="hyperfl"), Options(num_images=2))
    observed = record_round(target, tmp_path)
    reading = read_out(observed[0], target.knowledge())
    assert reading.embedding is not None
    v = common_embedding(4, "hyperfan-bias", 0)
    assert float((reading.embedding - v).norm() / v.norm()) < 1e-3


@pytest.mark.slow
@pytest.mark.extended
def test_images_are_found_by_the_attack_and_not_by_its_defended_twin(tmp_path: Path) -> None:
    """With the same images, attack and steps, everything is recovered without noise and nothing with noise 0.1."""
    options = Options(attacks=["head-gradient"], num_images=6, iterations=300)
    verdicts = {}
    for name, changes in (("open", {}), ("noise", {"privacy.clip-norm": 1.0, "privacy.noise-multiplier": 0.1})):
        full = settings(method="hyperfl", **changes) | {"hyperfl.hidden-width": 64, "hyperfl.embedding-dim": 16}
        target = make_attacked_round(full, options)
        (tmp_path / name).mkdir()
        write_audit(target, audit(target, options), tmp_path / name)
        document = json.loads((tmp_path / name / "audit.json").read_text())
        verdicts[name] = document["attacks"]["head-gradient"]["verdict"]
        for file in ("audit.html", "audit.md", "audit.png"):
            assert (tmp_path / name / file).stat().st_size > 500
        assert sentence(document, "head-gradient") in (tmp_path / name / "audit.md").read_text()
    assert verdicts == {"open": "recovered", "noise": "recovered nothing"}


def test_clipping_alone_hides_no_image() -> None:
    """It scales an upload by a factor that the attacker does not know, and `ig` uses the direction alone."""
    options = Options(attacks=["ig"], num_images=3, iterations=200)
    full = settings(method="fedavg", **{"privacy.clip-norm": 0.01, "learning-rate": 0.01})
    (found,) = audit(make_attacked_round(full, options), options).values()
    assert verdict(found.comparisons) == "recovered"


@pytest.mark.slow
def test_a_trained_model_is_attacked_with_its_clients_state(federate: Federate, tmp_path: Path) -> None:
    """The run's private state is used: the embedding that is read off is the trained client's."""
    run = federate("hyperfl", num_rounds=2)
    manifest = json.loads((run / "manifest.json").read_text())
    local = {"batch-size": 1, "local-epochs": 1}
    target = make_attacked_round({**manifest["settings"], **local}, Options(num_images=3), run)
    assert target.clients == range(3)
    observed = record_round(target, tmp_path)
    stored = np.load(run / "clients" / "client-00002" / "round-000002.npz")["embedding/v"]
    reading = read_out(observed[2], target.knowledge())
    assert reading.embedding is not None
    assert np.linalg.norm(reading.embedding.numpy() - stored) < 0.05 * np.linalg.norm(stored)
    with pytest.raises(ConfigError, match="6 clients would be attacked, 1 image each, but the trained"):
        make_attacked_round({**manifest["settings"], **local}, Options(num_images=6), run)


@pytest.mark.slow
def test_the_command_writes_everything_and_says_what_it_found(tmp_path: Path) -> None:
    words = ["audit", "--num-images", "2", "--iterations", "3", "--set", "hyperfl.hidden-width=8"]
    words += ["--attacks", "head-gradient,tailored"]
    result = CliRunner().invoke(cli, [*words, "--output", str(tmp_path / "a")], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.count("After one step on 1 image, ") == 2
    assert result.output.split()[-1] == str(tmp_path / "a" / "audit.html")
    document = json.loads((tmp_path / "a" / "audit.json").read_text())
    for found in document["attacks"].values():
        assert len(found["psnr"]["per_image"]) == 2
        assert found["lpips"] is None
        assert {"unrelated", "mean_image", "class_means", "next_client"} == set(found["control"])
        assert found["iterations"] == 3
    from_python = hyperfl_flwr.run_audit(
        num_images=np.int64(2), iterations=3, settings={"hyperfl.hidden-width": np.int64(8)},
        attacks=["head-gradient", "tailored"], output=tmp_path / "b", progress=False,
    )  # fmt: skip
    assert list(from_python.verdicts.values()) == result.stdout.splitlines()[:-1]
    assert from_python.report == tmp_path / "b" / "audit.html"
    for name, found in document["attacks"].items():
        assert from_python.numbers["attacks"][name] | {"seconds": found["seconds"]} == found


def test_a_wrong_audit_from_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--checkpoint cannot be given with --recorded"):
        hyperfl_flwr.run_audit(recorded=tmp_path, checkpoint=tmp_path, output=tmp_path / "a")
    with pytest.raises(ConfigError, match=r'attacks must be a list of names, such as \["ig"\]; got a text'):
        hyperfl_flwr.run_audit(attacks="ig", output=tmp_path / "a")
    with pytest.raises(ConfigError, match="settings must be a dictionary"):
        hyperfl_flwr.run_audit(settings=["a"], output=tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(RunDirectoryError, match=r"holds no audit\.json, so it is not the folder of an audit"):
        hyperfl_flwr.Audit(tmp_path)
    (tmp_path / "audit.json").write_text("{")
    with pytest.raises(StateError, match="repeat the audit"):
        _ = hyperfl_flwr.Audit(tmp_path).numbers
    for name in ("num_images", "batch_size", "samples", "local_epochs", "restarts", "iterations"):
        option, least = name.replace("_", "-"), 2 if name == "iterations" else 1
        for value in (0, -3, 2.0, float("nan"), "3"):
            with pytest.raises(ConfigError, match=f"--{option} must be a whole number of at least {least}; got "):
                hyperfl_flwr.run_audit(output=tmp_path / "a", **{name: value})  # type: ignore[arg-type]
    for weight in (-1.0, float("nan"), "3"):
        with pytest.raises(ConfigError, match="--total-variation must be a number of at least 0; got "):
            hyperfl_flwr.run_audit(output=tmp_path / "a", total_variation=weight)  # type: ignore[arg-type]


def test_a_link_to_nothing_is_no_place_for_results(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with (
        pytest.raises(RunDirectoryError, match="is a link to nothing"),
        result_directory(None, tmp_path / "runs/audit"),
    ):
        pass


def test_two_results_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    """A folder is made when its audit begins, and removed if the audit leaves nothing in it."""
    default = tmp_path / "runs" / "audit"
    with result_directory(None, default) as first, result_directory(None, default) as second:
        assert (first, second) == (default, default.with_name("audit-2"))
        (second / "audit.json").touch()
    assert not first.exists()
    assert second.exists()
    with result_directory(tmp_path / "given", default) as given:
        assert not given.exists()
    with pytest.raises(RunDirectoryError, match="is a file"), result_directory(None, second / "audit.json" / "audit"):
        pass


@pytest.mark.slow
def test_labels_are_found_even_when_other_attacks_are_told_them(tmp_path: Path) -> None:
    """With one image each, iDLG finds all labels; it reconstructs no images, and the audit is still written."""
    options = Options(attacks=["idlg"], num_images=3, labels_known=True)
    target = make_attacked_round(settings(method="fedavg"), options)
    findings = audit(target, options)
    assert findings["idlg"].labels_found == 1.0
    write_audit(target, findings, tmp_path)
    page = (tmp_path / "audit.md").read_text()
    assert "idlg found 100 % of the labels" in page
    assert "The attacks had the server's messages, the settings, and to find images the true labels." in page
    write_audit(replace(target, labels_known=False), findings, tmp_path)
    assert "The attacks had the server's messages and the settings." in (tmp_path / "audit.md").read_text()


@pytest.mark.slow
def test_what_a_run_has_recorded_is_attacked(federate: Federate) -> None:
    run = federate("fedavg", **{"audit.clients": "0", "audit.rounds": "1"})
    target, observed = recorded_round(run, {})
    assert (list(target.clients), len(observed), target.sizes) == ([0], 1, [40])
    findings = audit(target, Options(attacks=["ig"], iterations=2), observed)
    assert len(findings["ig"].comparisons[0].matched.psnr) == 40
    with pytest.raises(RunDirectoryError, match="has recorded nothing"):
        recorded_round(federate("fedavg"), {})


def test_what_malicious_nodes_have_sent_is_not_attacked(federate: Federate) -> None:
    forged = {"adversary.attack": "sign-flip", "adversary.nodes": "1", "audit.clients": "all", "audit.rounds": "1"}
    run = federate("fedavg", **forged)
    with pytest.raises(RunDirectoryError, match=r"has malicious nodes \(adversary.attack = sign-flip\)"):
        recorded_round(run, {})


def test_a_trained_clients_images_are_its_own(federate: Federate, tmp_path: Path) -> None:
    """The data are divided as in the run; of each client so many samples are drawn, and no more than it has."""
    run = federate("fedavg", num_rounds=1, **{"data.partition": "dirichlet-per-label", "data.train-samples": "auto"})
    own = load_federated_data(RunConfig.from_flat(settings_of(run)).data_settings())
    target = make_attacked_round(settings_of(run), Options(num_images=9, samples=3), run)
    for client in range(3):
        chosen = target.data().train_indices(client)
        assert len(chosen) == 3
        assert set(chosen) < set(own.train_indices(client))
    assert len(own.train_indices(0)) > 100
    assert [observation.num_examples for observation in record_round(target, tmp_path)] == [3, 3, 3]
    least = min(len(own.train_indices(client)) for client in range(5))
    with pytest.raises(ConfigError, match=f"of each client would be attacked; give --samples {least} at most"):
        make_attacked_round(settings_of(run), Options(num_images=5 * (least + 1), samples=least + 1), run)
    with pytest.raises(
        ConfigError, match=r"with --checkpoint, data.seed must be 0 as in the trained run.*; got 1; leave it out"
    ):
        make_attacked_round(settings_of(run) | {"data.seed": 1}, Options(num_images=1, samples=1), run)


@pytest.mark.parametrize(
    ("method", "attack"),
    [
        ("fedavg", "idlg"),
        ("fedavg", "ig"),
        ("hyperfl", "ig-paper"),
        ("hyperfl", "head-gradient"),
        ("it-pfl", "encoder-gradient"),
        ("priv-hfl", "dual-difference"),
        ("priv-hfl", "generator-dlg"),
    ],
)
def test_a_silent_client_ends_no_audit(method: str, attack: str, federate: Federate, tmp_path: Path) -> None:
    """Of three clients, one has learned nothing: the others are attacked. If all are silent, the report says so."""
    run = federate(method, **{"audit.clients": "0,1,2", "audit.rounds": "1", "data.train-samples": 2})
    target, observed = recorded_round(run, {})

    def silence(path: Path) -> None:
        seen = load_observation(path)
        zero = method == "priv-hfl"  # it sends changes and gradients, the others send values
        reply = {key: np.zeros_like(value) if zero else seen.received[key] for key, value in seen.reply.items()}
        save_observation(path, replace(seen, reply=reply))

    silence(observed.paths[1])
    options = Options(attacks=[attack], iterations=2)
    finding = audit(target, options, observed)[attack]
    assert [bool(result.nothing_to_read) for result in finding.results] == [False, True, False]
    write_audit(target, {attack: finding}, tmp_path)
    document = json.loads((tmp_path / "audit.json").read_text())
    (silent,) = document["attacks"][attack]["nothing_to_read"]
    assert silent == {"client": 1, "reason": finding.results[1].nothing_to_read}
    assert f"the attack has tested nothing{'' if attack == 'idlg' else ', and'}" in sentence(document, attack)
    assert f"(client 1: {silent['reason']})" in sentence(document, attack)
    if attack == "idlg":
        assert finding.labels_found is not None
        assert finding.labels_found <= 2 / 3
    else:  # the silent client's images are compared with what is known without it
        np.testing.assert_array_equal(finding.comparisons[1].matched.psnr, finding.comparisons[1].mean_image)
    for path in (observed.paths[0], observed.paths[2]):
        silence(path)
    finding = audit(target, options, observed)[attack]
    assert (list(finding.comparisons), finding.labels_found) == ([], None)
    write_audit(target, {attack: finding}, tmp_path)
    assert f"{attack} had nothing to read and has tested nothing: the " in (tmp_path / "audit.md").read_text()
    assert f"{attack}: nothing to read" in (tmp_path / "audit.html").read_text()


def test_the_report_has_the_sizes_of_unequal_clients(federate: Federate, tmp_path: Path) -> None:
    """The classes of digits are divided in random shares, so that each client has a size of its own."""
    changes = {"data.partition": "dirichlet-per-label", "data.train-samples": "auto", "batch-size": 200}
    run = federate("fedavg", num_rounds=1, **{**changes, "audit.clients": "0,1,2", "audit.rounds": "1"})
    target, observed = recorded_round(run, {})
    data = load_federated_data(target.config.data_settings())
    sizes = [len(data.train_indices(client)) for client in range(3)]
    assert len(set(sizes)) == 3
    write_audit(target, audit(target, Options(attacks=["idlg"]), observed), tmp_path)
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["samples_per_client"] == sizes
    assert document["local_steps"] == [-(-size // 200) for size in sizes]
    assert f"steps on {min(sizes)} to {max(sizes)} images)" in document["threat"]
    assert f"of {sum(sizes):,} private images" in (tmp_path / "audit.html").read_text()
    assert f"3 clients with {min(sizes)} to {max(sizes)} images each" in (tmp_path / "audit.md").read_text()


def test_data_with_client_ids_of_the_working_directory_are_attacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients of the file train, and those with the images asked for are attacked."""
    rng = np.random.default_rng(0)
    arrays = {f"{part}images": rng.integers(0, 256, (24, 8, 8), np.uint8) for part in ("", "test_")}
    labels = {f"{part}labels": np.tile(np.arange(2), 12) for part in ("", "test_")}
    clients = {f"{part}clients": np.repeat(np.arange(3), 8) for part in ("", "test_")}
    np.savez(tmp_path / "mine.npz", **arrays, **labels, **clients)
    monkeypatch.chdir(tmp_path)
    words = ["audit", "--method", "fedavg", "--dataset", "npz:mine.npz", "--attacks", "idlg", "--batch-size", "1"]
    options = ["--iterations", "2", "--set", "device=cpu"]
    result = CliRunner().invoke(cli, [*words, *options, "--num-images", "2", "--output", "found"])
    assert result.exception is None, result.exception
    assert json.loads((tmp_path / "found" / "audit.json").read_text())["clients"] == 2
    result = CliRunner().invoke(cli, [*words, *options, "--num-images", "4", "--output", "more"])
    assert "4 clients would be attacked, 1 image each, but npz:" in str(result.exception)
    assert "has 3 clients; attack at most 3 images" in str(result.exception)
    secure = ["--set", "secagg.enabled=true", "--set", "secagg.min-cohort=2"]
    result = CliRunner().invoke(cli, [*words, *options, *secure, "--num-images", "2", "--output", "sum"])
    assert "has 3, but 2 would be attacked; attack 3 images" in str(result.exception)
    novel = {"novel.clients": 1, "dataset": f"npz:{tmp_path / 'mine.npz'}"}
    assert make_attacked_round(settings(method="it-pfl", **novel), Options(num_images=2)).config.num_clients == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attacks", "nonsense"], "there is no attack 'nonsense'"),
        (
            ["--attacks", "ig", "--method", "hyperfl"],
            "ig does not apply to hyperfl; what does: ig-paper, head-gradient, rog, rog-paper, tailored",
        ),
        (["--attacks", "ig-prior"], "ig-prior needs public images of another data set: name it with --prior"),
        (["--attacks", "rog", "--prior", "mnist"], "--prior is for ig-prior only, which is not among the attacks"),
        (["--prior", "digits"], "the prior must be learned from another data set than the attacked digits"),
        (["--method", "local"], "no attack of this project applies to local"),
        (["--num-images", "5", "--batch-size", "4"], "must be a multiple of the samples per client, 4"),
        (["--checkpoint", "/nowhere", "--method", "fedavg"], "--method cannot be given with --checkpoint"),
        (["--recorded", "/nowhere", "--samples", "3"], "--samples cannot be given with --recorded"),
        (
            ["--recorded", "/nowhere", "--num-images", "20", "--batch-size", "1", "--local-epochs", "1"],
            "--num-images, --batch-size, --local-epochs cannot be given with --recorded, which determines it; leave",
        ),
        (["--by-neighbours", "--summed"], "--summed cannot be given with --by-neighbours"),
        (["--by-neighbours", "--method", "fedavg"], "clients see their neighbours in priv-hfl with"),
        (["--lpips-weights", "/nowhere"], "/nowhere is missing"),
        (["--dataset", "mnist", "--data-root", "/nowhere"], "data set mnist must lie in /nowhere"),
    ],
)
def test_bad_input_is_one_error(words: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["audit", *words, "--output", str(tmp_path / "a")])
    assert message in str(result.exception)
    assert not (tmp_path / "a").exists()


def test_the_owner_is_warned_of_tiny_clients_and_of_nothing_else() -> None:
    """Few samples give a warning, unless the upload is noisy or the method sends nothing."""

    def warned(samples: list[int], **changes: object) -> list[str]:
        return leak_warnings(RunConfig.from_flat(settings(**changes)), samples)

    (text,) = warned([600, 8, 1], method="hyperfl")
    assert "2 of 3 clients have few training samples, 8 at most" in text
    assert "--attacks head-gradient" in text
    assert "--attacks ig)" in warned([1], method="fedavg")[0]
    assert warned([600, 9], method="hyperfl") == []
    assert warned([1], method="local") == []
    noise = {"privacy.clip-norm": 1.0, "privacy.noise-multiplier": 0.1}
    assert warned([1], method="hyperfl", **noise) == []
    assert warned([1], method="hyperfl", **{**noise, "privacy.noise-multiplier": 0.01})
    assert warned([1], method="hyperfl", **noise, **{"privacy.unit": "client"}) == []
    from_server = {**noise, "privacy.unit": "client", "privacy.noise": "server"}
    assert warned([1], method="hyperfl", **from_server)  # the server sees the uploads without noise
    for epsilon, number in ((4.0, 0), (10.0, 0), (10.1, 1), (400.0, 1)):  # much epsilon is little noise
        assert len(warned([1], method="fedavg", **{"dp.epsilon": epsilon})) == number


def test_the_warning_of_tiny_clients_says_which_partition_leaves_samples_out() -> None:
    """It names the guarantee, and calls noise without one obfuscation."""

    def warned(pool: int, **changes: object) -> str:
        (text,) = leak_warnings(RunConfig.from_flat(settings(method="hyperfl", **changes)), [5, 5], pool)
        return text

    auto = {"data.train-samples": "auto"}
    text = warned(1347, **auto)
    assert "the partition similarity leaves out 1,337 of 1,347, data.partition = iid uses all; or fewer clients" in text
    assert text.endswith("are obfuscation: known attacks fail, but nothing is guaranteed")
    assert "or set dp.epsilon to 10 at most" in text
    for other in (warned(10, **auto), warned(0, **auto), warned(99, **auto, **{"data.partition": "iid"}), warned(99)):
        assert "give clients more samples (fewer clients, num-clients, or data.train-samples)" in other


@pytest.mark.parametrize(
    ("target", "samples", "epochs", "is_warned"),
    [
        ("mlp", 60, 2, True),
        ("mlp", 100, 3, True),
        ("mlp", 100, 4, False),
        ("mlp", 101, 2, False),
        ("cnn", 60, 2, False),
    ],
)
def test_images_in_a_perceptron_are_found_among_more(target: str, samples: int, epochs: int, is_warned: bool) -> None:
    """By the samples and local steps of a client; a network with convolutions hides as many."""
    changes = {"target": target, "batch-size": 20, "local-epochs": epochs, "num-clients": 2}
    config = RunConfig.from_flat(settings(method="fedavg", **changes))
    assert bool(leak_warnings(config, [600, samples])) == is_warned


@pytest.mark.parametrize(
    ("noise", "fraction", "times"), [("server", 0.2, 38), ("server", 1.0, 0), ("local", 1.0, 75), ("sum", 0.5, 25)]
)
def test_noise_that_drowns_the_changes_gives_a_warning(noise: str, fraction: float, times: int) -> None:
    """Of 100 clients, 20 in a round and 5 clipping norms of noise on their sum end in no accuracy."""
    privacy = {"unit": "client", "noise": noise, "clip-norm": 1.0, "noise-multiplier": 5.0}
    changes = {f"privacy.{key}": value for key, value in privacy.items()} | {"secagg.enabled": noise == "sum"}
    config = RunConfig.from_flat(
        settings(method="fedavg", **changes, **{"num-clients": 100, "fraction-train": fraction, "num-nodes": 100})
    )
    found = noise_warnings(config, 100, 22_602)
    assert [f"and {times} times as long" in text for text in found] == [True] * bool(times)


def test_the_multiplier_that_a_warning_names_gives_none() -> None:
    """It is rounded down."""
    privacy: dict[str, object] = {"privacy.unit": "client", "privacy.noise": "server", "privacy.clip-norm": 1.0}
    changes = privacy | {"num-clients": 20, "privacy.noise-multiplier": 5.0}
    (text,) = noise_warnings(RunConfig.from_flat(settings(method="fedavg", **changes)), 1, 22_602)
    (named,) = re.findall(r"noise-multiplier to (\S+) at most", text)
    changes["privacy.noise-multiplier"] = float(named)
    assert noise_warnings(RunConfig.from_flat(settings(method="fedavg", **changes)), 1, 22_602) == []


def test_chosen_attacks_are_those_of_the_method() -> None:
    fedrep, fedavg = (
        make_attacked_round(settings(method=name), Options(num_images=2)) for name in ("fedrep", "fedavg")
    )
    assert chosen_attacks([], fedrep) == ["head-gradient", "rog"]
    assert chosen_attacks(["idlg"], fedavg) == ["idlg"]
    data = load_federated_data(make_attacked_round(settings(), Options(num_images=4)).config.data_settings())
    assert data.num_clients == 4


def test_the_encoder_is_attacked_while_it_travels(federate: Federate) -> None:
    """In the first phase (round 1 of 2, or a round run for the attack) it is attacked, in the last round it is not."""
    fresh = make_attacked_round(settings(method="it-pfl"), Options(num_images=2))
    assert chosen_attacks([], fresh) == ["ig", "head-gradient", "idlg", "rog", "dlg", "encoder-gradient"]
    for recorded, attacks in (("1", chosen_attacks([], fresh)), ("2", chosen_attacks([], fresh)[:-1])):
        run = federate("it-pfl", **{"audit.clients": "0", "audit.rounds": recorded, "data.train-samples": 2})
        target, observed = recorded_round(run, {})
        assert chosen_attacks([], target) == attacks
        findings = audit(target, Options(attacks=attacks, iterations=2), observed)
        assert {name: len(finding.comparisons) for name, finding in findings.items()} == {
            name: int(name != "idlg") for name in attacks
        }
    after_the_last = make_attacked_round(settings_of(run), Options(num_images=1, samples=1), run)
    with pytest.raises(ConfigError, match="it-pfl, which sends no encoder in round 3; what does: ig, head-gradient, "):
        chosen_attacks(["encoder-gradient"], after_the_last)


def test_federations_that_are_run_warn(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(cli, ["run", "--dry-run", "--set", "data.train-samples=4", "--num-clients", "5"])
    assert result.exit_code == 0
    assert "warning: 5 of 5 clients" in result.output + result.stderr
