"""SRR-FL's client: trains as FedAvg's and randomises each weight of its reply.

Varun, Feng, Wang, Sural, Hong: "Towards Accurate and Stronger Local Differential Privacy for Federated Learning with
Staircase Randomized Response", CODASPY 2024. The mechanism is in `hyperfl_flwr.privacy.staircase`. The client's own
model, of which it reports the accuracy, is not randomised.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from numpy.typing import NDArray

from clients.fedavg import FedAvgClient
from hyperfl_flwr.config.run_config import RunConfig
from hyperfl_flwr.methods.srr_fl import SRRFLConfig
from hyperfl_flwr.privacy.release import RANDOMISED, Release
from hyperfl_flwr.privacy.staircase import Staircase
from hyperfl_flwr.protocol.messages import Reduction


class SRRFLClient(FedAvgClient):
    """Sends points of a public grid instead of its weights; all clients have the same weight in the mean."""

    shared: ClassVar[Mapping[str, Reduction]] = {"model": Reduction.MEAN}
    has_noisy_steps: ClassVar[bool] = False

    def reply(self, received: list[NDArray[Any]], trained: list[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the randomised arrays, see `Staircase.randomise`."""
        mechanism = staircase_of(self.context.config)
        return [mechanism.randomise(array) for array in trained]

    def release(self) -> Release:
        """Return what an upload releases: `srr-fl.epsilon` for each of its numbers."""
        numbers = sum(
            value.numel() for group in self.exchanged_groups() for value in self.groups[group].state_dict().values()
        )
        return Release(
            unit="client",
            mechanism=RANDOMISED,
            noise_multiplier=0.0,
            epsilon=staircase_of(self.context.config).epsilon,
            steps=numbers,
        )


def staircase_of(config: RunConfig) -> Staircase:
    """Return the mechanism of a run.

    Raises:
        ValueError: If the settings do not fit each other, see `Staircase`.
    """
    return Staircase(**config.section(SRRFLConfig).model_dump())
