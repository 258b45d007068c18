"""The reference of the benchmarks: the same client rounds as a plain PyTorch loop, without this project.

The hypernetwork has an `nn.Linear` head per tensor. Theta is generated for every batch, even where it is fixed.
Autograd differentiates through everything, `torch.optim.SGD` steps and `clip_grad_norm_` clips.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from hyperfl_flwr.data.federated_data import ClientData

State = dict[str, Tensor]
EMBEDDING_DIM, HIDDEN_WIDTH = 64, 128


@dataclass(frozen=True, kw_only=True)
class PlainSettings:
    """Settings of a plain client round.

    Attributes:
        epochs: Number of local epochs.
        batch_size: Number of samples per step.
        learning_rate: Step size of the model or hypernetwork.
    """

    epochs: int
    batch_size: int
    learning_rate: float


class PlainCNN(nn.Module):
    """HyperFL's CNN for 1x28x28 or 3x32x32 images, without its last layer.

    Args:
        input_shape: (channels, height, width).
    """

    def __init__(self, input_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, _ = input_shape
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1) if height == 32 else None
        self.fc = nn.Linear(576 if self.conv3 else 800, 128)

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, 128]."""
        hidden = images
        for convolution in (self.conv1, self.conv2, self.conv3):
            if convolution is not None:
                hidden = functional.leaky_relu(functional.max_pool2d(convolution(hidden), 2), 0.01)
        return functional.leaky_relu(self.fc(hidden.flatten(1)), 0.01)


class PlainHypernetwork(nn.Module):
    """A hypernetwork with one hidden layer and one linear head for each tensor of the extractor."""

    def __init__(self, extractor: nn.Module, embedding_dim: int, hidden_width: int) -> None:
        super().__init__()
        self.shapes = {name: parameter.shape for name, parameter in extractor.named_parameters()}
        self.hidden = nn.Linear(embedding_dim, hidden_width)
        self.heads = nn.ModuleList([nn.Linear(hidden_width, shape.numel()) for shape in self.shapes.values()])

    def forward(self, embedding: Tensor) -> dict[str, Tensor]:
        """Return the extractor's tensors by name."""
        hidden = functional.relu(self.hidden(embedding))
        return {
            name: head(hidden).view(shape) for (name, shape), head in zip(self.shapes.items(), self.heads, strict=True)
        }


def batches(data: ClientData, size: int, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one pass over the training data in random order."""
    order = torch.from_numpy(rng.permutation(len(data.train_labels)))
    for index in torch.split(order, size):
        yield data.train_images[index], data.train_labels[index]


def accuracy(predict: Callable[[Tensor], Tensor], data: ClientData) -> float:
    """Return the accuracy on the test data."""
    with torch.no_grad():
        parts = zip(torch.split(data.test_images, 200), torch.split(data.test_labels, 200), strict=True)
        return sum(int((predict(images).argmax(1) == labels).sum()) for images, labels in parts) / len(data.test_labels)


def mean_loss(data: ClientData, size: int, rng: np.random.Generator, step: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Run one pass of training steps and return its mean loss."""
    total = sum(step(images, labels).item() * len(labels) for images, labels in batches(data, size, rng))
    return total / len(data.train_labels)


class PlainFedAvg:
    """FedAvg's client round.

    Args:
        input_shape: Shape of an image, (channels, height, width).
        num_classes: Number of classes.
        settings: Epochs, batch size and step size.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, settings: PlainSettings) -> None:
        self.extractor = PlainCNN(input_shape)
        self.classifier = nn.Linear(128, num_classes)
        self.model = nn.ModuleDict({"extractor": self.extractor, "classifier": self.classifier})
        self.settings = settings

    def state_of(self, arrays: Mapping[str, Tensor]) -> State:
        """Convert the project's shared arrays, `group/name`, to this loop's state."""
        return {name.partition("/")[2]: value for name, value in arrays.items()}

    def load(self, state: State, private: State) -> None:
        """Load the received state at the start of a client's round."""
        self.model.load_state_dict(state)

    def save(self) -> tuple[State, State]:
        """Return the state to average and the client's private state."""
        return self.model.state_dict(), {}

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits [B, K] of images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.extractor(images))
        return logits

    def train(self, data: ClientData, rng: np.random.Generator) -> float:
        """Evaluate, train and evaluate again; returns the last epoch's loss."""
        accuracy(self.predict, data)
        rate = self.settings.learning_rate
        optimiser = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.5, weight_decay=5e-4)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            optimiser.zero_grad()
            loss = functional.cross_entropy(self.predict(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            return loss.detach()

        loss = float("nan")
        for _ in range(self.settings.epochs):
            loss = mean_loss(data, self.settings.batch_size, rng, step)
        accuracy(self.predict, data)
        return loss


class PlainHyperFL:
    """HyperFL's client round, see `PlainFedAvg`; embedding and classifier are private."""

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int, settings: PlainSettings) -> None:
        self.extractor = PlainCNN(input_shape).requires_grad_(False)
        self.classifier = nn.Linear(128, num_classes)
        self.hypernetwork = PlainHypernetwork(self.extractor, EMBEDDING_DIM, HIDDEN_WIDTH)
        self.v = nn.Parameter(torch.zeros(EMBEDDING_DIM))
        self.settings = settings

    def state_of(self, arrays: Mapping[str, Tensor]) -> State:
        """Convert the project's shared arrays, `group/name`, to this loop's state with a head per tensor."""
        values = {name.partition("/")[2]: value for name, value in arrays.items()}
        state = {"hidden.weight": values["hidden.weight"], "hidden.bias": values["hidden.bias"]}
        sizes = [shape.numel() for shape in self.hypernetwork.shapes.values()]
        parts = zip(
            torch.split(values["head_weight"], sizes, dim=1), torch.split(values["head_bias"], sizes), strict=True
        )
        for number, (weight, bias) in enumerate(parts):
            state |= {f"heads.{number}.weight": weight.t().contiguous(), f"heads.{number}.bias": bias}
        return state

    def load(self, state: State, private: State) -> None:
        """Load the received and the private state at the start of a client's round."""
        self.hypernetwork.load_state_dict(state)
        self.classifier.load_state_dict({name: private[f"classifier/{name}"] for name in ("weight", "bias")})
        self.v.data.copy_(private["embedding/v"])

    def save(self) -> tuple[State, State]:
        """Return the state to average and the client's private state."""
        own = {f"classifier/{name}": value.clone() for name, value in self.classifier.state_dict().items()}
        return self.hypernetwork.state_dict(), own | {"embedding/v": self.v.detach().clone()}

    def predict(self, images: Tensor) -> Tensor:
        """Return the logits [B, K] of images [B, C, H, W], with theta generated in each call."""
        features = functional_call(self.extractor, self.hypernetwork(self.v), (images,))
        logits: Tensor = self.classifier(features)
        return logits

    def train(self, data: ClientData, rng: np.random.Generator) -> float:
        """Evaluate, train and evaluate again; returns the last epoch's loss."""
        accuracy(self.predict, data)
        phi, varphi = list(self.classifier.parameters()), list(self.hypernetwork.parameters())
        step1 = torch.optim.SGD(phi, lr=0.1, momentum=0.5, weight_decay=5e-4)
        step2 = torch.optim.SGD([*varphi, self.v], lr=self.settings.learning_rate, momentum=0.5, weight_decay=5e-4)

        def train_classifier(images: Tensor, labels: Tensor) -> Tensor:
            return self._step(step1, images, labels)

        def train_hypernetwork(images: Tensor, labels: Tensor) -> Tensor:
            return self._step(step2, images, labels, [varphi, [self.v]])

        loss = mean_loss(data, self.settings.batch_size, rng, train_classifier)
        for _ in range(self.settings.epochs):
            loss = mean_loss(data, self.settings.batch_size, rng, train_hypernetwork)
        accuracy(self.predict, data)
        return loss

    def _step(
        self,
        optimiser: torch.optim.Optimizer,
        images: Tensor,
        labels: Tensor,
        clipped: Sequence[list[nn.Parameter]] = (),
    ) -> Tensor:
        for module in (self.hypernetwork, self.classifier):
            module.zero_grad()
        self.v.grad = None
        loss = functional.cross_entropy(self.predict(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameters in clipped:
            nn.utils.clip_grad_norm_(parameters, 50.0)
        optimiser.step()
        return loss.detach()


PLAIN: Mapping[str, type[PlainFedAvg] | type[PlainHyperFL]] = {"fedavg": PlainFedAvg, "hyperfl": PlainHyperFL}


@torch.no_grad()
def plain_round(
    model: PlainFedAvg | PlainHyperFL,
    state: State,
    privates: list[State],
    clients: Sequence[ClientData],
    rng_of: Callable[[int], np.random.Generator],
) -> tuple[State, float]:
    """Train all clients in turn and average them, weighted by samples; returns the new state and the mean loss."""
    total: State = {}
    losses, num_examples = [], 0
    for number, data in enumerate(clients):
        model.load(state, privates[number])
        with torch.enable_grad():
            losses.append(model.train(data, rng_of(number)))
        trained, privates[number] = model.save()
        weight = len(data.train_labels)
        num_examples += weight
        for name, value in trained.items():
            total[name] = total[name] + weight * value if name in total else weight * value
    return {name: value / num_examples for name, value in total.items()}, sum(losses) / len(losses)
