"""Recover labels from the gradient of a shared classifier, in closed form.

Zhao, Mopuri, Bilen: "iDLG: Improved Deep Leakage from Gradients", 2020. For the mean cross-entropy of B samples the
gradient of the last layer's bias is

    dL/db_k = mean_n p_nk - c_k / B        c_k = number of samples with label k

With B = 1 only the label's entry can be negative: exact for any network. For B > 1 a class with a negative entry
is certainly in the batch. The counts then follow greedily, by taking the most negative entry and adding 1/B to it, B
times; this is the rule of Wainakh et al. ("User-Level Label Leakage from Gradients in Federated Learning", PETS 2022)
with the impact 1/B of one sample known exactly instead of estimated. It is correct while the mean probabilities are
nearly equal over the classes (a network at its start), repeated labels included, which Yin et al. ("See through
Gradients", CVPR 2021) exclude. It fails for a trained network with B > 1, with active clipping, and after many local
steps: then the result is a guess.
"""

from collections.abc import Sequence

import numpy as np
import torch

from hyperfl_flwr.attacks.base import AttackSettings, IntArray, Reconstruction
from hyperfl_flwr.attacks.knowledge import PublicKnowledge
from hyperfl_flwr.attacks.readout import CLASSIFIER, Readout, read_out
from hyperfl_flwr.runs.observation import Observation


def idlg(
    observations: Sequence[Observation], knowledge: PublicKnowledge, settings: AttackSettings
) -> list[Reconstruction]:
    """Recover the labels of each client; the results have no images.

    Args:
        observations: Observations of a method that shares the classifier.
        knowledge: Public knowledge of the run.
        settings: Not used.

    Raises:
        ValueError: If the classifier is private.
    """
    no_images = np.zeros((0, *knowledge.input_shape), dtype=np.float32)
    return [
        Reconstruction(
            images=no_images, labels=recover_labels(read_out(observation, knowledge), observation.num_examples)
        )
        for observation in observations
    ]


def recover_labels(readout: Readout, num_examples: int) -> IntArray:
    """Return the labels [n], ascending, of the samples behind a reply; the module says when they are correct.

    Raises:
        ValueError: If the classifier is private.
    """
    if not readout.shares_classifier:
        raise ValueError("labels are read off the last layer's gradient, but this method keeps the classifier private")
    # Greedy: each found label explains -1/n of its entry; the rest goes to the most negative one.
    remaining = readout.gradient[f"{CLASSIFIER}.bias"].double().clone()
    counts = torch.zeros(len(remaining), dtype=torch.int64)
    for _ in range(num_examples):
        chosen = int(remaining.argmin())
        counts[chosen] += 1
        remaining[chosen] += 1 / num_examples
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts.numpy())
