"""What a node's owner decides, in `node.toml`, and how a SuperNode is told."""

import difflib
import shlex
import socket
import tomllib
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.setting_types import Scalar

FILE = "node.toml"
PLACE = "place.toml"
"""Which node it is, beside `node.toml`: not the owner's to change."""

_PATHS = ("data-root", "state-dir", "mixing-key-file", "novel-data", "novel-output")
_KINDS = ("npz:", "folder:")
"""Data that lie in a file or folder."""


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=_kebab)


Model = TypeVar("Model", bound=_Strict)


class NodeSettings(_Strict):
    """The keys of `node.toml`, see the comments there; an empty text and a missing key mean the same."""

    data: str = ""
    data_root: str = ""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    state_dir: Annotated[str, Field(min_length=1)] = "state"
    keep_model: bool = True
    max_message_mb: Annotated[int | float, Field(ge=0)] = 0
    mixing_key_file: str = ""
    novel_data: str = ""
    novel_output: str = ""
    novel_epsilon: Annotated[int | float, Field(gt=0)] | None = None
    novel_delta: Annotated[float, Field(gt=0, lt=1)] | None = None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `node.toml` in a node's folder.

        Raises:
            ConfigError: If it cannot be read or something in it is wrong; all that is wrong is told together.
        """
        return _read(cls, folder / FILE, "repair it; `hyperfl deploy init` has written what each key means")

    def config(self, folder: Path) -> dict[str, Scalar]:
        """Return the node config, without what the owner left open; paths are absolute.

        Args:
            folder: Where paths that are not absolute begin.
        """
        config: dict[str, Scalar] = {}
        initial = type(self)().model_dump(by_alias=True)
        for key, value in self.model_dump(by_alias=True).items():
            if value != initial[key] or key == "state-dir":
                config[key] = str(folder.absolute() / Path(value).expanduser()) if key in _PATHS else value
        if kind := next((kind for kind in _KINDS if self.data.startswith(kind)), None):
            config["data"] = f"{kind}{folder.absolute() / Path(self.data.removeprefix(kind)).expanduser()}"
        return config


class Place(_Strict):
    """Which node of how many a folder is, and where its SuperLink is reached."""

    number: Annotated[int, Field(ge=0)]
    nodes: Annotated[int, Field(ge=1)]
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read `place.toml` in a node's folder.

        Raises:
            ConfigError: If it cannot be read.
        """
        return _read(cls, folder / PLACE, "ask for the node's folder anew")

    def text(self) -> bytes:
        """Return the content of `place.toml`."""
        head = "# Written by `hyperfl deploy init` and not to be changed; node.toml is the owner's.\n"
        values = {"number": self.number, "nodes": self.nodes, "host": f'"{self.host}"', "port": self.port}
        return (head + "".join(f"{key} = {value}\n" for key, value in values.items())).encode()


def node_config(folder: Path) -> dict[str, Scalar]:
    """Return the node config of the node in a folder.

    Raises:
        ConfigError: If `node.toml` or `place.toml` cannot be used.
    """
    place, settings = Place.read(folder), NodeSettings.read(folder)
    return {"partition-id": place.number, "num-partitions": place.nodes, **settings.config(folder)}


def node_arguments(folder: Path) -> str:
    """Return the arguments that the SuperNode in a folder gets besides the fixed ones, quoted for the shell.

    The SuperNode and the processes below it speak over a port of this machine alone: a free one is taken.

    Raises:
        ConfigError: If `node.toml` or `place.toml` cannot be used, or names data that are not there.
    """
    values = node_config(folder)
    _refuse_missing_data(folder, values)
    config = " ".join(f"{key}={as_toml(value)}" for key, value in values.items())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = Place.read(folder)
    return shlex.join(["--superlink", f"{place.host}:{place.port}", "--port", str(port), "--node-config", config])


def as_toml(value: Scalar) -> str:
    """Return a value as Flower reads it out of `--node-config`: TOML, whose texts hold no quotation mark as such."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    escaped = "".join(
        f"\\u{ord(character):04x}" if character in '"\\' or ord(character) < 32 or ord(character) == 127 else character
        for character in value
    )
    return f'"{escaped}"'


def _refuse_missing_data(folder: Path, config: dict[str, Scalar]) -> None:
    data = str(config.get("data", ""))
    paths = {"novel-data": str(config.get("novel-data", ""))}
    if data.startswith(_KINDS):
        paths["data"] = data.partition(":")[2]
    for key, path in paths.items():
        if path and not Path(path).exists():
            raise ConfigError(f"{folder / FILE}: {key}: {path} does not exist; repair it, or mount what lies there")


def _read(model: type[Model], file: Path, remedy: str) -> Model:
    try:
        return model.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); {remedy}") from None
    except ValidationError as error:
        names = [str(field.alias) for field in model.model_fields.values()]
        raise ConfigError(f"{file}: {_problems(error, names)}; {remedy}") from None
    except ValueError as error:  # of TOML, or no UTF-8
        raise ConfigError(f"{file} is no TOML ({error}); {remedy}") from None


def _problems(error: ValidationError, names: list[str]) -> str:
    """Return in words all that is wrong with the keys, each told once."""
    found: dict[str, str] = {}
    for problem in error.errors():
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, names, n=1)
            found[key] = f"the key {key} is unknown" + (f" (do you mean {near[0]}?)" if near else "")
        elif problem["type"] == "missing":
            found[key] = f"the key {key} is missing"
        else:
            said = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
            before = found.get(key, "")
            found[key] = f"{before.partition('; got')[0]}, or {said}" if before else f"{key}: {said}"
            found[key] += f"; got {problem['input']!r}"
    return "; ".join(found.values())
