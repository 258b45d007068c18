"""FedFTG's client: FedAvg's client, which also sends its label counts; the server gets its model alone.

Zhang, Shen, Ding, Tao, Duan: "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
Learning", CVPR 2022.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import nn

from clients.engine.label_counts import LABELS, count_labels, label_counts
from clients.feddf import FedDFClient
from hyperfl_flwr.protocol.messages import Reduction


class FedFTGClient(FedDFClient):
    """Trains as FedAvg's client."""

    shared: ClassVar[Mapping[str, Reduction]] = {**FedDFClient.shared, LABELS: Reduction.EACH}

    def build_groups(self) -> dict[str, nn.Module]:
        """Return the model and the label counts."""
        return {**super().build_groups(), LABELS: label_counts(self.context)}

    def train(self, rng: np.random.Generator) -> dict[str, float]:
        """Train the model, and count the labels."""
        numbers = super().train(rng)
        count_labels(self.groups[LABELS], self.context)
        return numbers
