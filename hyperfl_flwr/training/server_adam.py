"""Adam on the server, which takes the clients' mean change as its gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021, algorithm
2 (FedAdam): the mean change of the clients is the descent direction of an ordinary optimiser.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hyperfl_flwr.core.optimisers import Adam

BETAS = (0.9, 0.99)
"""Decay rates of the averages of gradients and of squared gradients, as in the paper."""

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Names of these averages in the state of torch's Adam."""


class ServerAdam:
    """Adam over named parameters; see the module.

    If clients take one step of plain SGD it is Adam on the mean of their losses: Adam's steps do not depend on the
    scale of the gradient, so that the clients' rate has no effect.

    Args:
        initial: The parameters, float32, by name; only names and shapes are used.
        learning_rate: Step size.
    """

    def __init__(self, initial: Mapping[str, Tensor], learning_rate: float) -> None:
        self._parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
        self._optimiser = Adam(self._parameters.values(), lr=learning_rate, betas=BETAS)

    @torch.no_grad()
    def step(self, current: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take one step and return the new parameters.

        Args:
            current: The parameters that the clients received, by name.
            mean: Mean of the clients' parameters after local training.
        """
        for name, parameter in self._parameters.items():
            parameter.copy_(current[name])
            parameter.grad = current[name] - mean[name]
        self._optimiser.step()
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the averages and the number of steps, keyed `exp_avg/name`, `exp_avg_sq/name` and `step`."""
        return adam_state(self._optimiser, self._parameters)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned."""
        load_adam_state(self._optimiser, self._parameters, state)


def adam_state(optimiser: Adam, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Return Adam's averages and number of steps, keyed `exp_avg/name`, `exp_avg_sq/name` and `step`."""
    kept: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if state := optimiser.state[parameter]:
            kept |= {f"{average}/{name}": state[average] for average in AVERAGES} | {"step": state["step"]}
    return kept


def load_adam_state(optimiser: Adam, parameters: Mapping[str, torch.nn.Parameter], state: Mapping[str, Tensor]) -> None:
    """Restore a state that `adam_state` returned; an empty one is that before the first step."""
    optimiser.state.clear()
    if "step" in state:
        for name, parameter in parameters.items():
            averages = {average: state[f"{average}/{name}"].clone() for average in AVERAGES}
            optimiser.state[parameter] = averages | {"step": state["step"].clone()}
