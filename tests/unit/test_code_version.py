"""The version of this project's code in manifests: equal texts are equal code."""

from pathlib import Path

import pytest

from hyperfl_flwr.core.packages import code_version, versions
from hyperfl_flwr.core.packages.code_version import code_digest, code_entry, code_versions

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize("commit", ["", f"{COMMIT}-dirty", COMMIT])
def test_a_manifest_has_the_hash_of_code_that_no_commit_names(
    commit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two states of changed files, or of an installed version, are two versions; a clean commit is one anywhere."""
    monkeypatch.setenv(versions.COMMIT_VARIABLE, commit)
    texts = []
    for number in (1, 1, 2):
        for package in ("hyperfl_flwr", *code_version.APP):
            (tmp_path / package).mkdir(exist_ok=True)
            (tmp_path / package / "module.py").write_text(f"STEP = {number}\n")
        monkeypatch.setattr(code_version, "ROOT", tmp_path)
        entry = code_entry()
        assert entry.get("sha256") == (None if commit == COMMIT else code_digest())
        texts += code_versions({"code": entry, "versions": {"hyperfl-flwr": "0.1.0"}})
    assert texts[0] == texts[1]
    assert (texts[0] == texts[2]) is (commit == COMMIT)
    assert texts[0].startswith({"": "0.1.0 (", COMMIT: "0123456789ab"}.get(commit, "0123456789ab-dirty ("))


def test_versions_of_resumes_count() -> None:
    """Manifests of earlier versions have no hash."""
    parts = [
        {"code": {"commit": commit, "dirty": dirty}, "versions": {"hyperfl-flwr": "0.1.0"}}
        for commit, dirty in ((COMMIT, False), (COMMIT, True), (None, None))
    ]
    found = code_versions({**parts[0], "resumed": parts[1:]})
    assert found == ["0123456789ab", "0123456789ab-dirty", "0.1.0"]
