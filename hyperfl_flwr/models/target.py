"""The base class of target networks: a feature extractor and a linear classifier."""

from torch import Tensor, nn


class Target(nn.Module):
    """A network that classifies samples, split into a feature extractor and a last linear layer.

    Args:
        extractor: Maps images [B, C, H, W] or feature vectors [B, D] to features [B, F].
        classifier: Maps features [B, F] to logits [B, K].
    """

    def __init__(self, extractor: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.extractor = extractor
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits [B, K] of images [B, C, H, W] or feature vectors [B, D]."""
        logits: Tensor = self.classifier(self.extractor(images))
        return logits
