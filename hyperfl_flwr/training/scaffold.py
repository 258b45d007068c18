"""Control variates of SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, algorithm 1 with option II. Client i adds c - c_i to the gradient of each step. Its new c_i is the mean of its
gradients, found from the distance that the steps have moved it: K steps with the rate eta and the momentum beta along
a constant g move it by eta a(K, beta) g (`hyperfl_flwr.training.local_sgd.Epochs.reach`). With beta = 0 that is the
paper's eta K; with momentum, eta K would make the control variates too large by a factor of up to 1 / (1 - beta), and
training diverges.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hyperfl_flwr.training.public_training import LocalSteps

Array = TypeVar("Array", Tensor, NDArray[np.floating])


def control_change(received: Tensor, trained: Tensor, control: Tensor, reach: float) -> Tensor:
    """Return the change d = (x - y) / (eta a(K, beta)) - c of a client's control variate, which it uploads.

    Args:
        received: The parameters x [m] that the client received.
        trained: The parameters y [m] after its local steps along gradient + c - c_i.
        control: The server's control variate c [m] that it received.
        reach: eta a(K, beta) of these steps, above 0, see `reach_of`.
    """
    return (received - trained) / reach - control


def reach_of(steps: LocalSteps, num_examples: int) -> float:
    """Return eta a(K, beta): how far a client's local steps move a parameter with the constant gradient 1.

    Args:
        steps: The local steps.
        num_examples: Number of the client's training samples.
    """
    return steps.learning_rate * steps.reach(num_examples)


def next_control(control: Array, total: Array, num_clients: int) -> Array:
    """Return the server's next control variate, the mean of the c_i of all N clients: c + sum of d / N.

    Args:
        control: The server's control variate c [m].
        total: Sum of the changes d [m] of the clients that took part.
        num_clients: Number N of all clients, including those that did not take part.
    """
    return control + total / num_clients
