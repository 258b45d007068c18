"""Choose the engine of a simulation by a rough count of its work: a short run ends before Ray has started.

As with the number of nodes (`hyperfl_flwr.launch.sizing`), nothing is measured: the choice is the same each time. With
equal `threads` the engines give the same numbers, so that a wrong choice costs time only.
"""

import math

import torch
from torch import Tensor, nn

from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.data.federated_data import FederatedData
from hyperfl_flwr.launch.plans import IN_PROCESS, RAY, Engine
from hyperfl_flwr.launch.sizing import Machine
from hyperfl_flwr.models.pretrained.network import PretrainedTarget
from hyperfl_flwr.models.pretrained.weights import load_body
from hyperfl_flwr.models.provenance import use_weights
from hyperfl_flwr.models.targets import build_target

RAY_SECONDS = 15.0
"""Time that Flower's engine and Ray take to start and stop, and their messages in a short run; on two cores."""

STEP_SECONDS, FLOPS, STREAMED = 1.5e-3, 2.5e10, 5e9
"""Seconds of a step whatever the network, floating-point operations per second of a core, and bytes of shared
parameters per second that a step reads and writes: rough figures of docs/results/performance.md."""


LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""Layers of which the operations are counted."""


def chosen_engine(config: RunConfig, data: FederatedData, shared_bytes: int, machine: Machine) -> Engine:
    """Return the engine that ends sooner: one process, or Ray's, which share the work but take time to start.

    Args:
        config: The run's settings, with numbers in place of `auto`.
        data: The clients' data.
        shared_bytes: Bytes of the parameters that a client shares.
        machine: The machine.
    """
    busy = machine.parallel(1 if config.threads == "auto" else config.threads, shared_bytes)
    # With n processes: RAY_SECONDS + seconds / n < seconds.
    pays = busy > 1 and work_seconds(config, data, shared_bytes) > RAY_SECONDS * busy / (busy - 1)
    return RAY if pays else IN_PROCESS


def work_seconds(config: RunConfig, data: FederatedData, shared_bytes: int) -> float:
    """Return about how long one process trains and evaluates all clients of a run.

    Args:
        config: The run's settings, with numbers in place of `auto`.
        data: The clients' data.
        shared_bytes: Bytes of the parameters that a client shares.
    """
    shape, classes = data.dataset.input_shape, data.dataset.num_classes
    use_weights(config.lpm.weights)
    operations = max(sample_operations(name, shape, classes) for name in config.targets)
    clients = range(config.num_clients)
    trained, tested = (
        sum(len(indices(client)) for client in clients) / len(clients)
        for indices in (data.train_indices, data.test_indices)
    )
    steps = config.local_epochs * math.ceil(trained / config.batch_size)
    training = 3 * config.local_epochs * trained * operations / FLOPS  # backward is twice forward
    evaluation = 2 * tested * operations / FLOPS
    of_client = steps * (STEP_SECONDS + shared_bytes / STREAMED) + training + evaluation
    return config.num_rounds * max(1.0, config.fraction_train * config.num_clients) * of_client


def sample_operations(name: str, shape: tuple[int, ...], num_classes: int) -> float:
    """Return the floating-point operations of a forward pass of one sample, in convolutions and linear layers.

    It is infinite where they cannot be counted, in a network of your own that needs other values than zeros.

    Args:
        name: Name of the target network; the weights of a pre-trained body must have been chosen.
        shape: Shape of a sample.
        num_classes: Number of classes.
    """
    # Its values are of no interest. Without any, on the meta device, torch would load its compiler.
    found: list[float] = []
    target = build_target(name, shape, num_classes).to_empty(device="cpu")

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        # Every output value of a layer is a sum over the weights of its channel.
        found.append(2.0 * output.numel() * module.weight[0].numel())  # type: ignore[index]

    networks: list[nn.Module] = [target]
    if isinstance(target, PretrainedTarget):
        networks.append(load_body(target.extractor.name.body).network)
    layers = [layer for network in networks for layer in network.modules() if isinstance(layer, LAYERS)]
    handles = [layer.register_forward_hook(count) for layer in layers]  # removed again: a body is shared
    target.eval()
    try:
        with torch.no_grad():
            target(torch.zeros(1, *shape))
    except Exception:  # noqa: BLE001 - whatever a user's network raises; it is checked with values elsewhere
        return math.inf
    finally:
        for handle in handles:
            handle.remove()
    return sum(found)
