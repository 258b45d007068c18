"""Adam on the server, along the mean change of the clients.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021, algorithm
2 (FedAdam): what clients have changed, on average, is taken for the descent direction of an ordinary optimiser.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hyperfl_flwr.core.optimisers import Adam

BETAS = (0.9, 0.99)
"""Decay of the averages of gradients and of their squares; the paper's."""

AVERAGES = ("exp_avg", "exp_avg_sq")


class ServerAdam:
    """Adam over named parameters; see the module.

    With clients that take one step of plain SGD it is Adam on the mean of their losses: Adam's steps do not depend on
    the scale of the gradient, so the clients' rate has no effect.

    Args:
        initial: The parameters, float32, by name; only names and shapes matter.
        learning_rate: Step size.
    """

    def __init__(self, initial: Mapping[str, Tensor], learning_rate: float) -> None:
        self._parameters = {name: torch.nn.Parameter(value.clone()) for name, value in initial.items()}
        self._optimiser = Adam(self._parameters.values(), lr=learning_rate, betas=BETAS)

    @torch.no_grad()
    def step(self, current: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters after a step.

        Args:
            current: What the clients have received, by name.
            mean: The mean of what they have made of it.
        """
        for name, parameter in self._parameters.items():
            parameter.copy_(current[name])
            parameter.grad = current[name] - mean[name]
        self._optimiser.step()
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the averages and the number of steps, keyed `exp_avg/name`, `exp_avg_sq/name` and `step`."""
        kept: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if state := self._optimiser.state[parameter]:
                kept |= {f"{average}/{name}": state[average] for average in AVERAGES} | {"step": state["step"]}
        return kept

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go back to a state that `state` returned."""
        self._optimiser.state.clear()
        if "step" in state:
            for name, parameter in self._parameters.items():
                averages = {average: state[f"{average}/{name}"].clone() for average in AVERAGES}
                self._optimiser.state[parameter] = averages | {"step": state["step"].clone()}
