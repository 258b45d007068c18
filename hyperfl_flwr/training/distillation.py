"""Data-free distillation: a client's loss on pseudo-data, and its gradients for the generator.

Najafi et al., PRIV-HFL, equations 18 to 22. All clients hold the same generator omega. In each round a client draws
labels and noise once and generates pseudo-data x' = G(z, y). Its local loss is the cross-entropy on private data plus
the cross-entropy on x'. It then sends the gradient of the latter, f_g(theta_i, omega), with respect to omega, and the
server steps omega along the mean over the clients. Both sides minimise f_g: the generator is cooperative, not
adversarial.

Two choices that the paper leaves open: x' is drawn once per round, as in its algorithm 1, and the local steps take
random batches of it; the gradient is taken at the trained theta_i, over all of x'.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.core.device import send
from hyperfl_flwr.models.generator import NOISE_DIM, Generator
from hyperfl_flwr.models.layers.batchnorm import preserve_running_statistics


def label_probabilities(counts: Tensor, balance: float) -> Tensor:
    """Return the class probabilities of pseudo-data: p(y) proportional to R - n_y with R = c max n_y.

    The paper's equation 19 reads R n_y. Its text says that R is much larger than n_y and that minority classes are
    favoured, which holds for the difference only. The difference is also defined for classes that a client lacks.

    Args:
        counts: The client's number of samples of each class, n_y [K].
        balance: c > 1; near 1 the most frequent class is hardly drawn, with large c all classes are equally likely.

    Returns:
        float64 [K], positive, with sum 1.
    """
    rest = balance * counts.max() - counts.double()
    return rest / rest.sum()


@dataclass(frozen=True, kw_only=True)
class PseudoData:
    """A client's pseudo-data of one round.

    Attributes:
        generator: The generator G; its parameters require gradients.
        images: Normalised images x' [P, C, H, W], with the graph to the generator's parameters.
        labels: Labels y [P], int64.
    """

    generator: Generator
    images: Tensor
    labels: Tensor

    @classmethod
    def draw(
        cls, generator: Generator, counts: Tensor, *, number: int, balance: float, rng: torch.Generator
    ) -> "PseudoData":
        """Draw labels and noise, and generate images from them.

        Args:
            generator: The generator G; images and labels are on its device.
            counts: The client's number of samples of each class [K].
            number: Number of samples P, at least 2.
            balance: See `label_probabilities`.
            rng: A CPU generator, so that all devices get the same numbers.
        """
        device = generator.noise.weight.device
        labels = torch.multinomial(label_probabilities(counts.cpu(), balance), number, replacement=True, generator=rng)
        noise = torch.randn(number, NOISE_DIM, generator=rng)
        labels = labels.to(device)
        return cls(generator=generator, images=generator(noise.to(device), labels), labels=labels)

    def loss(self, model: nn.Module, batch_size: int, rng: np.random.Generator) -> Tensor:
        """Return a model's mean cross-entropy on a random batch, in nats; its running statistics do not change."""
        chosen = torch.from_numpy(rng.choice(len(self.labels), min(batch_size, len(self.labels)), replace=False))
        chosen = send(chosen, self.labels.device)
        with preserve_running_statistics(model):
            return functional.cross_entropy(model(self.images.detach()[chosen]), self.labels[chosen])

    def gradients(self, model: nn.Module) -> tuple[dict[str, Tensor], float]:
        """Return the gradient of f_g with respect to omega, by parameter name, and f_g; can be called only once."""
        with preserve_running_statistics(model):
            loss = functional.cross_entropy(model(self.images), self.labels)
        names, parameters = zip(*self.generator.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)), float(loss.detach())
