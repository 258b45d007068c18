"""Report what the results of a run depend on at one host of a cluster: its packages, its code, its data and its device.

Each host makes its report in a process of its own before a run starts. Hosts with equal reports compute the same bits.
"""

from collections.abc import Mapping
from pathlib import Path

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.core.device import resolve_device
from hyperfl_flwr.core.packages.code_version import code_digest
from hyperfl_flwr.core.packages.versions import versions
from hyperfl_flwr.core.setting_types import Scalar
from hyperfl_flwr.data.digests import data_digest
from hyperfl_flwr.data.federated_data import load_federated_data
from hyperfl_flwr.data.registry import DATASETS
from hyperfl_flwr.models.provenance import method_hash, network_hash


def report(settings: Mapping[str, Scalar]) -> dict[str, str]:
    """Return a host's report on a run.

    Args:
        settings: All settings of the run by dotted key. With `data-root` alone, the names of the data sets there are
            reported instead of the network, the device and the data.

    Returns:
        The version of each package as `versions/NAME`, the SHA-256 of this project's code (`code`), of the source of a
        network of the user's own or of the weights of a pre-trained body (`network`), of the source of a method of the
        user's own (`method`) and of the data set (`data`), the type of the device (`device`), and the data sets that
        are present (`data-sets`), separated by commas.

    Raises:
        HyperFLError: If this host does not have the data or the device.
    """
    found = {f"versions/{name}": version for name, version in versions().items()} | {"code": code_digest()}
    if settings.keys() == {"data-root"}:
        found["data-sets"] = ",".join(present_data_sets(Path(str(settings["data-root"]))))
    else:
        config = RunConfig.from_flat(settings)
        found["network"] = network_hash(config.target, config.lpm.weights)
        found["method"] = method_hash(config.method)
        found["device"] = resolve_device(config.device).type
        found["data"] = data_digest(load_federated_data(config.data_settings()).dataset)
    return found


def present_data_sets(root: Path) -> list[str]:
    """Return the names of the data sets of which all files are below a folder; none is read."""
    known = {name: spec for name, spec in DATASETS.items() if spec.load is not None}
    return [name for name, spec in known.items() if all(path.exists() for path in spec.files(root))]
