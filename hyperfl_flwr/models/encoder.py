"""The client encoder of IT-PFL-HN: it maps a client's set of unlabelled samples to a descriptor.

"Inference-Time Personalized Federated Learning", under review at ICLR 2022, sections 4 and 6 and appendices B to D. The
architecture is DeepSets (Zaheer et al., NeurIPS 2017): each sample becomes a vector phi(x), the vectors are pooled over
the set, and linear layers psi map the pooled vector to the descriptor:

    g(D) = psi(pool of phi(x) over x in D)

psi starts by standardising the pooled vector over its units (layer normalisation without parameters). The paper does
not do this; it is needed since the means of unit vectors differ little between clients.

Pooling runs over ALL samples of a set, however they are divided into batches. The paper averages the descriptors of
batches, which gives a sample of a short last batch more weight.
"""

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from hyperfl_flwr.core.setting_types import Pooling
from hyperfl_flwr.models.layers.dropout import without_dropout
from hyperfl_flwr.models.pretrained.names import is_pretrained
from hyperfl_flwr.models.targets import PERCEPTRONS, build_target

IMAGE_UNITS = 200
"""Length of phi(x) of an image (appendix C)."""
VECTOR_UNITS = 500
"""Length of phi(x) of a feature vector, and width of the linear layers after the pooling (appendix C)."""

BATCH = 500
"""Number of samples that are processed at a time when a descriptor is computed, which bounds the memory."""


class Encoder(nn.Module):
    """Maps a set of n samples to a descriptor of length d.

    Args:
        body: Maps samples [n, ...] to vectors phi [n, U].
        head: Maps a pooled vector [U] to a descriptor [d].
        pooling: See `Pooling`.
    """

    def __init__(self, body: nn.Module, head: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.body, self.head, self.pooling = body, head, pooling

    def phi(self, samples: Tensor) -> Tensor:
        """Return the vectors [n, U] to pool; with `pooling = mean` they have length 1, or 0 where all units are 0."""
        vectors: Tensor = self.body(samples)
        return functional.normalize(vectors, dim=1) if self.pooling == "mean" else vectors

    def forward(self, samples: Tensor) -> Tensor:
        """Return the descriptor [d] of samples [n, ...] as one set, n > 0, with its graph."""
        vectors = self.phi(samples)
        descriptor: Tensor = self.head(self._joined(vectors.sum(dim=0), vectors.amax(dim=0), len(samples)))
        return descriptor

    @torch.no_grad()
    def pooled(self, samples: Tensor) -> Tensor:
        """Return the pooled vector [U] of samples [n, ...] as one set, n > 0, in float64."""
        # Sums over large sets keep float32's accuracy only in float64.
        parts = [self.phi(batch).double() for batch in torch.split(samples, BATCH)]
        total = torch.stack([vectors.sum(dim=0) for vectors in parts]).sum(dim=0)
        largest = torch.stack([vectors.amax(dim=0) for vectors in parts]).amax(dim=0)
        return self._joined(total, largest, len(samples))

    @torch.no_grad()
    def descriptor(self, samples: Tensor) -> Tensor:
        """Return the descriptor [d] of samples [n, ...] as one set, n > 0: equal to `forward` up to rounding."""
        descriptor: Tensor = self.head(self.pooled(samples).to(next(self.parameters()).dtype))
        return descriptor

    def _joined(self, total: Tensor, largest: Tensor, number: int) -> Tensor:
        averaged = len(total) if self.pooling == "mean" else len(total) // 2
        return torch.cat([total[:averaged] / number, largest[averaged:]])


def build_encoder(target: str, input_shape: Sequence[int], embedding_dim: int, pooling: Pooling) -> Encoder:
    """Build the encoder that belongs to a target network.

    For a convolutional target: its convolutions, a linear layer of 200 units with its activation, pooling,
    standardisation, its linear layers with their activations, and a linear layer to the descriptor. For `mlp` and
    `mlp-500`, which also take feature vectors [n, D]: three linear layers of 500 units with ReLU, pooling and
    standardisation after the first, and a linear layer to the descriptor. For a user-supplied target and one on a
    pre-trained body: its extractor without dropout, a linear layer of 200 units with ReLU, pooling, standardisation,
    another linear layer of 200 units with ReLU, and a linear layer to the descriptor.

    Args:
        target: Name of the target network, see `hyperfl_flwr.models.targets.build_target`.
        input_shape: Shape of a sample: (channels, height, width); any shape for `mlp` and `mlp-500`.
        embedding_dim: Length d of the descriptor.
        pooling: See `Pooling`.

    Returns:
        The encoder on the meta device.

    Raises:
        ValueError: If the target is unknown, cannot take such inputs, or has no layer `flatten` that separates
            convolutions from linear layers.
    """
    convolutions: list[nn.Module]
    activation: nn.Module
    if ":" in target or is_pretrained(target):
        own = build_target(target, tuple(input_shape), 2)  # the number of classes only shapes the unused classifier
        convolutions, activation = [without_dropout(own.extractor)], nn.ReLU()
        widths, inputs, units = [IMAGE_UNITS], own.classifier.in_features, IMAGE_UNITS
    elif target in PERCEPTRONS:
        widths, inputs, units = [VECTOR_UNITS, VECTOR_UNITS], math.prod(input_shape), VECTOR_UNITS
        convolutions, activation = [nn.Flatten()], nn.ReLU()
    else:
        children = dict(build_target(target, tuple(input_shape), 2).extractor.named_children())
        names = list(children)
        if "flatten" not in names:
            raise ValueError(f"no encoder is defined for the {target} target; cnn, lenet, mlp and mlp-500 have one")
        end = names.index("flatten") + 1
        convolutions, after = [children[name] for name in names[:end]], [children[name] for name in names[end:]]
        linear = [layer for layer in after if isinstance(layer, nn.Linear)]
        widths, inputs, units = [layer.out_features for layer in linear], linear[0].in_features, IMAGE_UNITS
        activation = after[1]
    with torch.device("meta"):
        body = [*convolutions, nn.Linear(inputs, units), copy.deepcopy(activation)]
        head: list[nn.Module] = [nn.LayerNorm(units, elementwise_affine=False)]
        for before, width in zip([units, *widths], widths, strict=False):
            head += [nn.Linear(before, width), copy.deepcopy(activation)]
        head.append(nn.Linear(widths[-1], embedding_dim))
        return Encoder(nn.Sequential(*body), nn.Sequential(*head), pooling)
