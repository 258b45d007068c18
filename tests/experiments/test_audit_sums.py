"""The audit of a server that sees only the sum of the uploads: a recorded round of digits, attacked end to end."""

import json
from dataclasses import replace

import pytest

from hyperfl_flwr.audit.audit import audit
from hyperfl_flwr.audit.chosen import chosen_attacks
from hyperfl_flwr.audit.make_round import make_attacked_round
from hyperfl_flwr.audit.options import Options
from hyperfl_flwr.audit.record_round import record_round, view
from hyperfl_flwr.audit.report import measure, write_audit
from hyperfl_flwr.audit.sentences import sentence
from hyperfl_flwr.config.table import default_settings
from hyperfl_flwr.core.errors import ConfigError

OPTIONS = Options(num_images=6, samples=2, summed=True, iterations=3)


def target(options=OPTIONS, **changes):
    settings = {"method": "hyperfl", "batch-size": 2, "local-epochs": 1, "hyperfl.embedding": "per-client"}
    settings |= {"hyperfl.hidden-width": 4} | changes
    return make_attacked_round(default_settings() | settings, options)


def test_a_sum_is_attacked_from_end_to_end(tmp_path):
    """Three clients with two digits each give one sum, one assignment over all images, and a report."""
    summed = target()
    findings = audit(summed, OPTIONS)
    assert list(findings) == ["head-gradient", "channels-known", "channels-ica"]
    assert [len(result.images) for result in findings["head-gradient"].results] == [6]
    assert [len(result.images) for result in findings["channels-known"].results] == [2, 2, 2]
    for finding in findings.values():
        (comparison,) = finding.comparisons
        assert comparison.matched.psnr.shape == comparison.mean_image.shape == (6,)
    write_audit(summed, findings, tmp_path)
    document = json.loads((tmp_path / "audit.json").read_text())
    assert document["summed"]
    assert document["local_steps"] == 1
    assert "seen as the sum of 3 clients" in sentence(measure(summed, findings), "channels-ica")
    assert "channels-known also had the clients' activations" in (tmp_path / "audit.md").read_text()


def test_the_server_sees_one_reply_of_all_samples(tmp_path):
    summed = target()
    recorded = record_round(summed, tmp_path)
    seen = view(summed, recorded)
    (observation,) = seen.observations
    assert (observation.num_examples, seen.knowledge.summed_clients) == (6, 3)
    alone = view(replace(summed, summed=False), recorded)
    assert alone.observations is recorded
    assert alone.knowledge.summed_clients == 1


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="attacks on a sum use no labels"):
        replace(OPTIONS, labels_known=True)
    with pytest.raises(ConfigError, match="channels-ica does not apply to hyperfl; what does"):
        chosen_attacks(["channels-ica"], target(replace(OPTIONS, summed=False)))
    with pytest.raises(ConfigError, match="ig-paper does not apply to the sum of uploads of hyperfl"):
        chosen_attacks(["ig-paper"], target())
    with pytest.raises(ConfigError, match="no attack of this project applies to the sum of uploads of pfedhn"):
        chosen_attacks([], target(method="pfedhn"))
