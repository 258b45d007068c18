"""Private names of Flower and Ray are used in `hyperfl_flwr/flower` only, and are as they were when checked."""

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigScalar, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.simulation.ray_transport.ray_actor import BasicActorPool, pool_size_from_resources
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable import inflatable_object
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from packaging.requirements import Requirement
from ray._private.node import Node
from source_trees import tree_of

from hyperfl_flwr.core.errors import InstallationError
from hyperfl_flwr.core.files.toml_files import app_file
from hyperfl_flwr.flower import CHECKED_VERSION, objects
from hyperfl_flwr.flower.grid import is_http_grid, is_in_memory_grid, replaced_client
from hyperfl_flwr.flower.home import get_flwr_home
from hyperfl_flwr.flower.log import FLOWER_LOGGER, log
from hyperfl_flwr.flower.messages import identify_process, set_message_id, set_origin
from hyperfl_flwr.flower.numpy_client import NumPyClient
from hyperfl_flwr.flower.ray_start import ATTEMPTS, HELPERS, TOO_SLOW, WITHOUT_HELPERS, start_again
from hyperfl_flwr.launch.flower.env import flower_command

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "hyperfl_flwr" / "flower"
FOLDERS = ("hyperfl_flwr", "strategies", "clients", "experiments", "benchmarks", "scripts")

RENEW = (
    "Another Flower than {checked} is asked for or installed: read `Renewing Flower` in CONTRIBUTING.md, compare the "
    "names in hyperfl_flwr/flower with the new Flower, and only then change CHECKED_VERSION"
)


def is_public(name: str) -> bool:
    """Return whether a full name is one of Flower's public packages or is in the `__all__` of one."""
    first, *parts = name.split(".")
    found: Any = importlib.import_module(first)
    for part in parts:
        if not isinstance(found, ModuleType) or part not in found.__all__:
            return False
        found = getattr(found, part)
    return True


def private_uses(tree: ast.Module) -> list[str]:
    """Return a module's uses of Flower and Ray that are not public: imports, fields of messages, and the database."""
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sqlite3.connect":
            found.append("sqlite3.connect")
        found += [name for name in names if name.split(".")[0] == "flwr" and not is_public(name)]
        found += [name for name in names if name.startswith("ray._")]
    return found


def test_only_the_room_uses_what_is_not_public() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if ROOM not in path.parents]
    uses = {str(path.relative_to(ROOT)): private_uses(tree_of(path)) for path in files}
    assert len(uses) > 200
    assert {name: found for name, found in uses.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from flwr.common import log",
        "from flwr.client import NumPyClient",
        "from flwr.app.message import remove_content_from_message",
        "from flwr.serverapp.strategy import fedavg",
        "import flwr.supercore.log",
        "if TYPE_CHECKING:\n    from flwr.superlink.grid import HttpGrid",
        "def f():\n    from flwr import simulation",
        "message.metadata.__dict__['_message_id'] = 1",
        "sqlite3.connect(name)",
        "from ray._private.node import Node",
    ],
)
def test_a_private_use_is_seen(source: str) -> None:
    assert len(private_uses(ast.parse(source))) == 1


def test_public_uses_are_let_through() -> None:
    flowers = "import flwr\nimport flwr.clientapp\nfrom flwr.serverapp.strategy import Result"
    others = f"{flowers}\nimport flwr_datasets.partitioner\nfrom . import flower"
    assert private_uses(ast.parse(others)) == []


def test_the_names_were_compared_with_the_flower_that_is_used() -> None:
    """CONTRIBUTING.md, "Renewing Flower", says what to do when this fails."""
    problem = RENEW.format(checked=CHECKED_VERSION)
    project = tomllib.loads(app_file("pyproject.toml").read_text())
    (flower,) = (line for line in project["project"]["dependencies"] if Requirement(line).name == "flwr")
    allowed = Requirement(flower).specifier
    major, minor = map(int, CHECKED_VERSION.split("."))
    assert f"{CHECKED_VERSION}.99" in allowed, problem
    assert not any(f"{major}.{number}.99" in allowed for number in (minor - 1, minor + 1)), problem
    for used in (version("flwr"), project["tool"]["flwr"]["app"]["flwr-version-target"]):
        assert used.startswith(f"{CHECKED_VERSION}."), problem
    with pytest.raises(InstallationError) as error:
        flower_command("no-such-command")
    assert flower in str(error.value)


PARAMETERS: list[tuple[Callable[..., object], str]] = [
    (log, "level msg args kwargs"),
    (get_flwr_home, ""),
    (NumPyClient.fit, "self parameters config"),
    (NumPyClient.evaluate, "self parameters config"),
    (inflatable_object.get_object_body, "object_content cls"),
    (inflatable_object.get_object_children_ids_from_object_content, "object_content"),
    (BasicActorPool.add_actor_back_to_pool, "self future"),
    (BasicActorPool.submit, "self actor_fn job"),
    (pool_size_from_resources, "client_resources"),
    (Node.start_monitor, "self"),
    (Node.start_api_server, "self include_dashboard raise_on_failure"),
    (Node.start_log_monitor, "self"),
    (FleetHttpClient.from_server_address, "server_address insecure root_certificates interceptors retry_invoker"),
    (FleetHttpClient.ActivateNode, "self request"),
    (FleetHttpClient.DeactivateNode, "self request"),
    (NodeAuthHttpInterceptor, "private_key public_key"),
    (RuntimeHttpClient.from_server_address, "server_address insecure root_certificates interceptors retry_invoker"),
    (RuntimeHttpClient.AcquireTask, "self request"),
    (RuntimeVersionHttpInterceptor, "component_name"),
    (SuperExecAuthHttpInterceptor, "master_secret protected_methods"),
    (flwr_clientapp, ""),
    (public_key_to_bytes, "public_key"),
    (FlowerError.from_json, "value"),
]


@pytest.mark.parametrize(("function", "parameters"), PARAMETERS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_functions_have_the_parameters_that_they_had(function: Callable[..., object], parameters: str) -> None:
    """`make check` compares the types, but it does not see what Flower replaces at run time."""
    assert " ".join(inspect.signature(function).parameters) == parameters


def test_the_actor_pool_has_the_attributes_that_are_used() -> None:
    """The pool has the attributes that are used; tests/simulation tests it with a process and with a host that dies."""
    used = {"pool", "num_actors", "client_resources", "create_actor_fn", "_future_to_actor"}
    assert used <= set(BasicActorPool.__init__.__code__.co_names)


@pytest.mark.parametrize(
    ("program", "variables", "patched"),
    [
        ("flower-supernode", {WITHOUT_HELPERS: "1"}, []),
        ("flwr-simulation", {}, ["init"]),
        ("flwr-simulation", {WITHOUT_HELPERS: "1"}, ["init", *HELPERS]),
    ],
)
def test_ray_is_patched_in_simulations_only(program: str, variables: dict[str, str], patched: list[str]) -> None:
    """The client app is imported as Flower does. With Flower's own commands, Ray starts all its processes."""
    code = (
        "import sys; sys.argv = sys.argv[1:]; import hyperfl_flwr.app.client; print('ray' in sys.modules);"
        "import ray; from ray._private.node import Node; found = {'init': ray.init} | vars(Node);"
        "print(*(name for name in sys.argv[1:] if found[name].__code__.co_filename.endswith('ray_start.py')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != WITHOUT_HELPERS} | variables
    words = [sys.executable, "-c", code, f"/bin/{program}", "init", *HELPERS]
    found = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    imported, names = found.stdout.splitlines()
    assert (imported, names.split()) == (str(bool(patched)), patched)


@pytest.mark.parametrize(("message", "calls"), [(f"The node {TOO_SLOW}.", ATTEMPTS), ("no such address", 1)])
def test_ray_is_started_again_only_where_it_was_too_slow(message: str, calls: int) -> None:
    asked = []

    def start(address: str, *, num_cpus: int) -> None:
        asked.append((address, num_cpus))
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message):
        start_again(start)("local", num_cpus=2)
    assert asked == [("local", 2)] * calls


def test_the_values_of_a_numpy_client_have_a_public_name() -> None:
    assert inspect.signature(NumPyClient.fit).parameters["config"].annotation == dict[str, ConfigScalar]


def test_the_log_is_that_of_the_logger() -> None:
    assert log == FLOWER_LOGGER.log


def test_the_home_is_that_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert Path(get_flwr_home()) == tmp_path


FRESH = """
from flwr.app import Message, RecordDict
from hyperfl_flwr.flower.messages import identify_process
try:
    Message(RecordDict(), dst_node_id=7, message_type="train")
except RuntimeError as error:
    print(error)
identify_process()
print(Message(RecordDict(), dst_node_id=7, message_type="train").metadata.dst_node_id)
"""


def test_a_process_that_is_not_flowers_makes_messages_when_it_is_identified() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["TaskIdentity.run_id is not set.", "7"]


def test_a_message_takes_an_id_and_an_origin() -> None:
    identify_process()
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    set_message_id(message, "first")
    reply = Message(RecordDict(), reply_to=message)
    assert (message.metadata.message_id, reply.metadata.reply_to_message_id) == ("first", "first")
    set_origin(reply, "second", 8)
    assert (reply.metadata.reply_to_message_id, reply.metadata.src_node_id) == ("second", 8)


def test_an_array_names_its_chunks_in_their_order() -> None:
    array = Array(np.arange(1_500_000, dtype=np.float64))
    contents = {key: part.deflate() for key, part in get_all_nested_objects(ArrayRecord({"x": array})).items()}
    (content,) = filter(objects.is_array, contents.values())
    chunks = [contents[key] for key in objects.chunk_ids(content)]
    assert len(chunks) > 1
    assert all(map(objects.is_array_chunk, chunks))
    assert b"".join(chunk.partition(b"\0")[2] for chunk in chunks) == array.data
    assert len(contents) == len(chunks) + 2  # the record and the array


class _OneNode:
    """A client for a grid's requests, which reports one node."""

    def GetNodes(self, request: object) -> GetNodesResponse:  # noqa: N802 - Flower's name
        return GetNodesResponse(nodes=[NodeInfo(node_id=7)])


def test_another_client_makes_a_grids_requests_for_a_while() -> None:
    grid = HttpGrid(token="secret")
    own = grid._runtime_client
    with replaced_client(grid, lambda _own: _OneNode()) as client:
        assert isinstance(client, _OneNode)
        assert list(grid.get_node_ids()) == [7]
    assert grid._runtime_client is own
    grid.close()
    assert is_http_grid(grid)
    assert not is_in_memory_grid(grid)
