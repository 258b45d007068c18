"""Divide a target network into groups that are shared or private: its two parts, or its normalisation layers."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperfl_flwr.models.initialisation import initial_model
from hyperfl_flwr.models.target import Target

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Types of torch's layers that normalise; the first is the base of BatchNorm and InstanceNorm, which torch does not
export."""


class Entries(nn.Module):
    """Some entries of a network as a group that is loaded, stored and sent; the network itself stays whole.

    Args:
        network: The network.
        names: Names of the parameters and buffers in its `state_dict()`; their order there is that of the group.
    """

    def __init__(self, network: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self.network, self.names = network, frozenset(names)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the group by their names in the network."""
        for name, parameter in self.network.named_parameters("", recurse, remove_duplicate):
            if name in self.names:
                yield prefix + name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's signature
        """Return the entries of the group by their names in the network."""
        values = self.network.state_dict(*args, **kwargs)
        return {name: value for name, value in values.items() if name in self.names}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ANN401 - torch's signature
        """Load the entries of the group into the network.

        Raises:
            ValueError: If `strict` and the names are not those of the group.
        """
        if strict and set(state_dict) != self.names:
            raise ValueError(f"expected the entries {sorted(self.names)}, got {sorted(state_dict)}")
        return self.network.load_state_dict(state_dict, strict=False, assign=assign)


def normalisation_names(network: nn.Module) -> list[str]:
    """Return the names of the parameters and statistics of a network's normalisation layers, found by their types."""
    layers = {name for name, layer in network.named_modules() if isinstance(layer, NORMALISATION)}
    return [name for name in network.state_dict() if name.rpartition(".")[0] in layers]


def groups_of(target: Target) -> Mapping[str, nn.Module]:
    """Return the groups that a target network can be divided into, as views: loading a group changes the network.

    `model` is all of it. `extractor` and `classifier` are its two parts. `normalisation` has the parameters and
    statistics of its normalisation layers, and `layers` has all others.
    """
    inside = normalisation_names(target)
    return {
        "model": target,
        "extractor": target.extractor,
        "classifier": target.classifier,
        "normalisation": Entries(target, inside),
        "layers": Entries(target, [name for name in target.state_dict() if name not in inside]),
    }


def initial_groups(target: Target, names: Collection[str], seed: int) -> dict[str, dict[str, Tensor]]:
    """Return the values that some groups have in the initial model of a run.

    Args:
        target: The network on the meta device; it gets these values.
        names: Names of the groups, see `groups_of`.
        seed: The run's seed.
    """
    target.load_state_dict(initial_model(target, seed), assign=True)
    groups = groups_of(target)
    return {name: dict(groups[name].state_dict()) for name in names}
