"""Properties of a node's data, for its answer to the handshake."""

import hashlib
import json
from collections.abc import Sequence

from flwr.app import ConfigRecordValues

from hyperfl_flwr.data.digests import sample_digest
from hyperfl_flwr.data.federated_data import FederatedData
from hyperfl_flwr.data.sample_format import is_local_data, normalisation_text
from hyperfl_flwr.protocol.messages import DATA_VERSION
from hyperfl_flwr.protocol.queries import COLUMNS


def data_properties(
    data: FederatedData, clients: Sequence[int], *, simulated: bool, sizes: bool = True
) -> dict[str, ConfigRecordValues]:
    """Return the properties of a node's data for the handshake.

    The numbers of training samples are the same that every answer to a TRAIN message contains. With secure sums, no
    message of a deployed node contains them.

    Args:
        data: Data of all clients.
        clients: Ids of the clients that the node hosts.
        simulated: Whether the node is simulated, without private data; then label counts, augmentation and
            normalisation are reported, too.
        sizes: Whether the numbers of training samples are reported.
    """
    dataset = data.dataset
    properties: dict[str, ConfigRecordValues] = {
        "input-shape": list(dataset.input_shape),
        "num-classes": dataset.num_classes,
        "partitioned-by": data.partition,
    }
    if sizes:
        properties["num-examples"] = [len(data.train_indices(client)) for client in clients]
    if dataset.classes:
        properties["classes"] = list(dataset.classes)
    if dataset.features:  # as a hash: the names would leave the node
        properties[COLUMNS] = hashlib.sha256("\n".join(dataset.features).encode()).hexdigest()
    if simulated:
        for split, counts in zip(("train", "test"), data.label_counts(), strict=True):
            properties[f"{split}-label-counts"] = counts[list(clients)].flatten().tolist()
        properties["data-reuse"] = json.dumps(data.reuse)
        properties["augmentation"] = "crops and flips" if dataset.augment else "none"
        properties["normalisation"] = normalisation_text(dataset.mean, dataset.std)
        if dataset.target_std:
            properties["target-scale"] = normalisation_text(dataset.target_mean, dataset.target_std, "targets")
        if is_local_data(dataset.name):
            properties[DATA_VERSION] = sample_digest(dataset)
    return properties
