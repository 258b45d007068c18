"""A network's source: where it is found, which of its files are sent to nodes, and which names are refused."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import Call

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.packages.source_files import LARGEST, copy, digest_of, files_of
from hyperfl_flwr.core.packages.user_code import UserCode
from hyperfl_flwr.launch.app_bundle import build_app
from hyperfl_flwr.models.provenance import travelling_sources

NETWORK = """
from torch import nn

from {package}.parts import WIDTH


def build(input_shape, num_classes):
    inputs = input_shape[0] * input_shape[1] * input_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_classes))
"""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore Python's finders, and forget the modules that a test has imported."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.startswith("netof"):
            del sys.modules[name]


def write_package(folder: Path, name: str) -> Path:
    """Write a package with modules, a file of settings, and files that are not sent to nodes; return its folder."""
    package = folder / name
    (package / "deep").mkdir(parents=True)
    (package / "__pycache__").mkdir()
    (package / ".hidden").mkdir()
    texts = {
        "__init__.py": "", "nets.py": NETWORK.format(package=name), "deep/__init__.py": "", "sizes.json": "[5]",
        "parts.py": "import json\nfrom pathlib import Path\n"
        "(WIDTH,) = json.loads(Path(__file__).with_name('sizes.json').read_text())\n",
        "test_parts.py": "", "notes.txt": "", "__pycache__/x.py": "", ".hidden/y.py": "",
    }  # fmt: skip
    for file, text in texts.items():
        (package / file).write_text(text)
    return package


TRAVELS = ["__init__.py", "deep/__init__.py", "nets.py", "parts.py", "sizes.json"]


def test_a_package_is_found_copied_and_hashed(tmp_path: Path) -> None:
    package = write_package(tmp_path, "netof_a")
    assert UserCode("target", "netof_a.nets:build").find([tmp_path]) == package
    assert list(files_of(package)) == [f"netof_a/{name}" for name in TRAVELS]
    copy(package, tmp_path / "copy")
    assert digest_of(tmp_path / "copy" / "netof_a") == digest_of(package)
    (package / "notes.txt").write_text("not part of it")
    assert digest_of(tmp_path / "copy" / "netof_a") == digest_of(package)
    (package / "sizes.json").write_text("[6]")
    assert digest_of(tmp_path / "copy" / "netof_a") != digest_of(package)


def test_the_first_folder_counts_and_none_is_none(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "netof_b.py").write_text("")
    folders = [tmp_path / "none", tmp_path / "one", tmp_path / "other"]
    assert UserCode("target", "netof_b:build").find(folders) == tmp_path / "one" / "netof_b.py"
    assert UserCode("target", "netof_c:build").find(folders) is None


def test_an_installed_package_s_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")
    with pytest.raises(ConfigError, match=r"and would hide it; rename it"):
        UserCode("target", "numpy:build").find([tmp_path])


@pytest.mark.parametrize("name", ["clients", "strategies", "experiments", "hyperfl_flwr", "random", "os"])
def test_names_of_this_project_and_of_python_are_refused(name: str, tmp_path: Path) -> None:
    """Such a name is refused whether a file of that name exists or not."""
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"{name} is (this project's|Python's); give your own package or module"):
            UserCode("target", f"{name}.path:build").find([tmp_path])
        (tmp_path / f"{name}.py").write_text("")


def test_what_is_found_comes_before_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's copy is imported in place of another version on Python's path, or of one that was imported before."""
    for folder, number in (("path", 1), ("copy", 2), ("same", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "netof_l.py").write_text(f"x = {number}")
    monkeypatch.syspath_prepend(tmp_path / "path")
    code = UserCode("target", "netof_l:x")
    assert code.load() == 1
    assert code.find([tmp_path / "copy"]) == tmp_path / "copy" / "netof_l.py"
    assert code.load() == 2
    module = sys.modules["netof_l"]
    code.find([tmp_path / "same"])
    code.load()
    assert sys.modules["netof_l"] is module  # the same source is not imported again
    (tmp_path / "copy" / "netof_l.py").write_text("x = 3 # changed")
    code.find([tmp_path / "copy"])
    assert code.load() == 3
    code.find([tmp_path / "none"])
    assert code.load() == 1


@pytest.mark.parametrize("name", ["build", "lib", "env", "test_net", "net_test"])
def test_names_that_flower_leaves_out_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    with pytest.raises(ConfigError, match=rf"Flower leaves {name} out of an app because of its name; rename"):
        UserCode("target", f"{name}:build").find([tmp_path])


def test_too_much_source_is_refused(tmp_path: Path) -> None:
    package = write_package(tmp_path, "netof_d")
    (package / "table.json").write_text("0" * (LARGEST + 1))
    with pytest.raises(ConfigError, match="8 MB of source, an app can hold 8 MB"):
        UserCode("target", "netof_d.nets:build").find([tmp_path])


def test_the_app_includes_it_and_flower_builds_it(tmp_path: Path) -> None:
    """The bundle that `flwr build` makes contains the package's files that nodes need, and no others."""
    write_package(tmp_path, "netof_e")
    UserCode("target", "netof_e.nets:build").find([tmp_path])
    app = build_app(tmp_path / "app", travelling_sources({"target": "netof_e.nets:build"}))
    patterns = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["fab-include"]
    assert [name for name in patterns if "netof_e" in name] == [f"netof_e/{name}" for name in TRAVELS]
    assert "strategies/**/*.py" in patterns
    flwr = Path(sys.executable).with_name("flwr")
    subprocess.run([flwr, "build", "--app", app], cwd=tmp_path, check=True, capture_output=True)
    (bundle,) = tmp_path.glob("*.fab")
    listing = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", bundle], capture_output=True, text=True, check=True
    ).stdout
    for name in TRAVELS:
        assert f"netof_e/{name} " in listing
    assert "notes.txt" not in listing
    assert (
        "netof_e"
        not in (build_app(tmp_path / "plain", travelling_sources({"target": "cnn"})) / "pyproject.toml").read_text()
    )


def test_the_command_line_finds_it_in_the_working_directory(call: Call) -> None:
    """`--dry-run` builds and tries the network, and writes nothing."""
    write_package(Path.cwd(), "netof_f")
    before = sorted(Path.cwd().rglob("*"))
    code, out, err = call("run", "--model", "netof_f.nets:build", "--method", "fedavg", "--dry-run")
    assert code == 0, err
    numbers = 64 * 5 + 5 + 5 * 10 + 10
    assert f"{4 * numbers / 1e6:.2f} MB down" in out
    assert [path for path in sorted(Path.cwd().rglob("*")) if "__pycache__" not in path.parts] == [
        path for path in before if "__pycache__" not in path.parts
    ]


BAD = {
    "netof_g:build": "no module netof_g is in the working directory or installed",
    "netof_h:build": "its module imports netof_i, which is not found: the app contains netof_h only",
    "netof_j:build": r"the module netof_j cannot be imported: SyntaxError",
    "netof_k:build": "build in module netof_k does not exist",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told_before_anything_starts(name: str, call: Call) -> None:
    texts = {"netof_h": "import netof_i", "netof_i": "x = 1", "netof_j": "def build(:", "netof_k": "x = 1"}
    for module, text in texts.items():
        Path(f"{module}.py").write_text(text)
    code, out, err = call("run", "--model", name)
    assert (code, out) == (2, "")
    assert f"error: target = {name}: {BAD[name]}" in " ".join(err.split())
    assert "Traceback" not in err
    assert json.dumps(name) not in out
    assert not Path("runs").exists()
