"""Data-free distillation: pseudo-data in the local loss, and the loss by which their generator learns.

Najafi et al., PRIV-HFL, equations 18 to 22. All clients hold the same generator omega. In a round a client draws labels
and noise once and makes pseudo-data x' = G(z, y); its local loss is the cross-entropy on private data plus that on x'.
Then it sends the gradient of the latter, f_g(theta_i, omega), with respect to omega, and the server steps omega along
the mean of all. Both sides minimise f_g: the generator is cooperative, not adversarial.

What the paper leaves open is decided here: x' is drawn once per round, as algorithm 1 prints it, and the local steps
take random batches of it; the gradient is taken at the trained theta_i, over all of x'.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.models.generator import NOISE_DIM, Generator
from hyperfl_flwr.models.layers.batchnorm import statistics_kept


def label_probabilities(counts: Tensor, balance: float) -> Tensor:
    """Return how often pseudo-data of each class are drawn: p(y) proportional to R - n_y with R = c max n_y.

    The paper's equation 19 reads R n_y, with an R that its text calls much larger than n_y and says to favour minority
    classes, which only the difference does; it also has a value for classes that a client lacks.

    Args:
        counts: n_y [K], the client's samples of each class.
        balance: c > 1; near 1 the most frequent class gets none, with large c all get alike.

    Returns:
        float64 [K], positive, with sum 1.
    """
    rest = balance * counts.max() - counts.double()
    return rest / rest.sum()


@dataclass(frozen=True, kw_only=True)
class PseudoData:
    """A client's pseudo-data of one round.

    Attributes:
        generator: G, whose parameters require gradients.
        images: x' [P, C, H, W], normalised, with the graph that leads to the generator's parameters.
        labels: y [P], int64.
    """

    generator: Generator
    images: Tensor
    labels: Tensor

    @classmethod
    def draw(
        cls, generator: Generator, counts: Tensor, *, number: int, balance: float, rng: torch.Generator
    ) -> "PseudoData":
        """Draw labels and noise, and make images of them.

        Args:
            generator: G; images and labels are made where it is.
            counts: The client's samples of each class [K].
            number: P, at least 2.
            balance: See `label_probabilities`.
            rng: A CPU generator.
        """
        device = generator.noise.weight.device
        labels = torch.multinomial(label_probabilities(counts.cpu(), balance), number, replacement=True, generator=rng)
        noise = torch.randn(number, NOISE_DIM, generator=rng)
        labels = labels.to(device)
        return cls(generator=generator, images=generator(noise.to(device), labels), labels=labels)

    def loss(self, model: nn.Module, batch_size: int, rng: np.random.Generator) -> Tensor:
        """Return a model's mean cross-entropy on a random batch of them, in nats; running statistics stay."""
        chosen = torch.from_numpy(rng.choice(len(self.labels), min(batch_size, len(self.labels)), replace=False))
        chosen = chosen.to(self.labels.device)
        with statistics_kept(model):
            return functional.cross_entropy(model(self.images.detach()[chosen]), self.labels[chosen])

    def gradients(self, model: nn.Module) -> tuple[dict[str, Tensor], float]:
        """Return the gradient of f_g with respect to omega, by parameter name, and f_g itself; used once."""
        with statistics_kept(model):
            loss = functional.cross_entropy(model(self.images), self.labels)
        names, parameters = zip(*self.generator.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)), float(loss.detach())
