"""Read a node's folder: settings in `node.toml`, place in the federation in `place.toml`, SuperNode's arguments."""

import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperfl_flwr.config.refusals import explain
from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.ports import free_port
from hyperfl_flwr.core.setting_types import Scalar

if TYPE_CHECKING:
    from hyperfl_flwr.config.node_config import NodeConfig

FILE = "node.toml"
PLACE = "place.toml"
"""File with the node's number and its SuperLink's address, written by the operator and not by the owner."""

_OPERATOR_KEYS = ("partition-id", "num-partitions", "simulated")
"""Keys of a node config that the owner must not set in `node.toml`."""


class NodeAddress(BaseModel):
    """Place of a node in its deployment: its number, the number of all nodes, and the SuperLink's address."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    number: Annotated[int, Field(ge=0)]
    nodes: Annotated[int, Field(ge=1)]
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `place.toml` in a node's folder.

        Raises:
            ConfigError: If the file cannot be read, or a value is wrong.
        """
        file, remedy = folder / PLACE, "ask the operator for the node's folder again"
        values = _table(file, remedy)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"in {file}, {explain(error.errors(), list(cls.model_fields))}; {remedy}") from None

    def text(self) -> bytes:
        """Return the content of `place.toml`."""
        head = "# Written by `hyperfl deploy init`. Change it only if the operator asks. Your settings: node.toml.\n"
        values = {"number": self.number, "nodes": self.nodes, "host": f'"{self.host}"', "port": self.port}
        return (head + "".join(f"{key} = {value}\n" for key, value in values.items())).encode()


def read_settings(folder: Path) -> "NodeConfig":
    """Return the settings of `node.toml` in a node's folder, with absolute paths and a state-dir.

    Raises:
        ConfigError: If the file cannot be read, or with all keys that are unknown or have a wrong value.
    """
    from hyperfl_flwr.config.node_config import NodeConfig  # imports torch, which the operator's commands do not need

    file = folder / FILE
    values = _table(file, "correct it; `hyperfl deploy init` writes an example that explains each key")
    known = [str(field.alias) for field in NodeConfig.model_fields.values() if field.alias not in _OPERATOR_KEYS]
    if wrong := [key for key in _OPERATOR_KEYS if key in values]:
        raise ConfigError(f"{file}: {', '.join(wrong)} cannot be set by a node's owner; remove from the file")
    if values.get("state-dir", "") == "":
        values["state-dir"] = "state"
    try:
        return NodeConfig.model_validate(values, context={"folder": folder.absolute()})
    except ValidationError as error:
        raise ConfigError(f"in {file}, {explain(error.errors(), known)}") from None


def read_node_config(folder: Path) -> "NodeConfig":
    """Return the complete node config of a node's folder, from `node.toml` and `place.toml`.

    Raises:
        ConfigError: If one of these files cannot be read or has a wrong value.
    """
    place = NodeAddress.read(folder)
    return read_settings(folder).model_copy(update={"partition_id": place.number, "num_partitions": place.nodes})


def node_arguments(folder: Path) -> str:
    """Return the arguments that `start.sh` adds to the SuperNode's command, quoted for the shell.

    They include a free loopback port, over which the SuperNode and its processes communicate.

    Raises:
        ConfigError: If `node.toml` or `place.toml` is wrong, or names data or keys that do not exist.
    """
    place, node = NodeAddress.read(folder), read_node_config(folder)
    _refuse_missing_files(folder, node)
    # `worker` is for start.sh; the app of a run that an earlier version has started does not know it.
    config = " ".join(f"{key}={as_toml(value)}" for key, value in node.flat().items() if key != "worker")
    port = str(free_port())
    return shlex.join(["--superlink", f"{place.host}:{place.port}", "--port", port, "--node-config", config])


def as_toml(value: Scalar) -> str:
    """Format a value as TOML for `--node-config`; quotation marks are escaped, because Flower splits the text there."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    escaped = "".join(
        f"\\u{ord(character):04x}" if character in '"\\' or ord(character) < 32 or ord(character) == 127 else character
        for character in value
    )
    return f'"{escaped}"'


def _refuse_missing_files(folder: Path, node: "NodeConfig") -> None:
    paths = {
        "novel-data": node.novel_data,
        "join-data": node.join_data.partition(":")[2],
        "data": node.data.partition(":")[2],
        "lpm-weights": node.lpm_weights.removeprefix("auto"),
        "mixing-key-file": node.mixing_key_file,
        "peers-file": node.peers_file,
        "identity-key-file": node.identity_key_file,
    }
    for key, path in paths.items():
        if path and not Path(path).exists():
            raise ConfigError(f"{folder / FILE}: {key}: {path} does not exist; correct it, or mount the missing folder")


def _table(file: Path, remedy: str) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); {remedy}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{file} is not valid TOML ({error}); {remedy}") from None
