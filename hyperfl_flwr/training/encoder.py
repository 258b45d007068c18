"""Local training of IT-PFL-HN's encoder: it learns to map batches of samples to the client's embedding.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, equation 8.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hyperfl_flwr.core.optimisers import SGD
from hyperfl_flwr.models.encoder import Encoder
from hyperfl_flwr.training.local_sgd import Epochs, TrainingData, run_epochs


def train_encoder(
    encoder: Encoder,
    embedding: Tensor,
    data: TrainingData,
    epochs: Epochs,
    rng: np.random.Generator,
    *,
    learning_rate: float,
    clip_norm: float = 0.0,
) -> float:
    """Minimise the mean over batches B of |g(B) - e|^2 / d by SGD, changing the encoder in place; labels are not used.

    Args:
        encoder: The encoder g.
        embedding: The client's embedding e [d], a constant.
        data: The client's training samples.
        epochs: Number of passes or steps, and settings of SGD.
        rng: Order of the samples and augmentation.
        learning_rate: Step size.
        clip_norm: Largest norm of the gradient; 0 does not clip.

    Returns:
        Mean loss of the last pass (of all steps, if `epochs.steps` is set); each batch's loss is taken before its step.
    """
    parameters = list(encoder.parameters())
    optimiser = SGD(parameters, lr=learning_rate, momentum=epochs.momentum, weight_decay=epochs.weight_decay)

    def step(images: Tensor, _: Tensor) -> Tensor:
        optimiser.zero_grad()
        loss = functional.mse_loss(encoder(images), embedding)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimiser.step()
        return loss.detach()

    return run_epochs(step, data, epochs, rng)
