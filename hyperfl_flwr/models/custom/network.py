"""Load and split a user-supplied target network, which a run names by `package.module:factory`.

The factory is called with (input_shape, num_classes) and returns a torch module that maps samples [B, *input_shape] to
logits [B, K]. Its classifier is the last module, in the order of `named_modules()`, that holds parameters directly: a
linear layer with K outputs. The network with that layer replaced by an identity is the extractor.

The initial values are those that the factory draws from torch's CPU generator under a seed of the run. This works for
any layers, and a factory may load trained values instead. Three substitutions keep the results the same: dropout draws
from the generator of the client and the round, BatchNorm has no counter of batches, and buffers of other layers become
constants, which are not exchanged.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hyperfl_flwr.core.errors import ConfigError
from hyperfl_flwr.core.packages.package_finder import where
from hyperfl_flwr.core.packages.user_code import UserCode
from hyperfl_flwr.models.initialisation import SelfInitialised
from hyperfl_flwr.models.layers.batchnorm import WITHOUT_COUNTER, AnyBatchNorm
from hyperfl_flwr.models.layers.dropout import Dropout
from hyperfl_flwr.models.target import Target

_DROPOUT: dict[type[nn.Module], bool] = {nn.Dropout: False, nn.Dropout1d: True, nn.Dropout2d: True, nn.Dropout3d: True}
"""torch's dropout layer -> whether it drops whole channels."""


@dataclass(frozen=True)
class Factory:
    """A user's function that makes a network, with the arguments that it is called with.

    Attributes:
        name: Name of the factory, `package.module:factory`.
        input_shape: Shape of a sample: (C, H, W) or (D,).
        num_classes: Number of classes K.
    """

    name: str
    input_shape: tuple[int, ...]
    num_classes: int

    @property
    def code(self) -> UserCode:
        """The factory as code of the user's own."""
        return UserCode("target", self.name)

    def problem(self, text: str) -> ConfigError:
        """Return an error about the network; its message begins with the setting `target`."""
        return self.code.problem(text)

    def call(self, seed: int) -> nn.Module:
        """Call the factory under a seed of torch's CPU generator, and restore the generator's state afterwards.

        Raises:
            ConfigError: If the factory does not exist or fails, or if it returns anything but a network with float32
                parameters on the CPU.
        """
        make = self.find()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                made = make(self.input_shape, self.num_classes)
            except Exception as error:
                shape = f"input_shape = {self.input_shape}, num_classes = {self.num_classes}"
                raise self.problem(f"the factory failed with {shape}: {where(error)}") from error
        if not isinstance(made, nn.Module):
            raise self.problem(f"the factory must return a torch.nn.Module, but returned {type(made).__name__}")
        self._check_parameters(made)
        return made

    def find(self) -> Callable[[tuple[int, ...], int], object]:
        """Import the function.

        Raises:
            ConfigError: If there is none.
        """
        found = self.code.load()
        if not callable(found):
            module, _, attribute = self.name.partition(":")
            raise self.problem(f"{attribute} in module {module} is of type {type(found).__name__}; name a callable")
        return found

    def _check_parameters(self, network: nn.Module) -> None:
        """Refuse parameters that cannot be shared: absent, lazy, not float32 on the CPU, scalar, frozen, or tied."""
        named = dict(network.named_parameters(remove_duplicate=False))
        if not named:
            raise self.problem("the network has no parameters")
        first: dict[int, str] = {}
        for name, parameter in named.items():
            if isinstance(parameter, nn.UninitializedParameter):
                raise self.problem(
                    f"{name} has no shape yet; call lazy layers once in the factory, or give their sizes"
                )
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu" or parameter.ndim == 0:
                kind = f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)} on {parameter.device}"
                raise self.problem(f"parameters must be float32 on the CPU, of one dimension or more; {name} is {kind}")
            if not parameter.requires_grad:
                raise self.problem(f"all parameters are trained, but {name} is frozen; register it as a buffer instead")
            if id(parameter) in first:
                raise self.problem(
                    f"{first[id(parameter)]} and {name} are one tensor; tied parameters are not supported: give each "
                    f"layer a separate tensor"
                )
            first[id(parameter)] = name


class CustomExtractor(nn.Module, SelfInitialised):
    """The part of a user-supplied network below its classifier.

    Args:
        network: The network with the classifier replaced by an identity.
        factory: The factory that made the network.
    """

    def __init__(self, network: nn.Module, factory: Factory) -> None:
        super().__init__()
        self.network, self._factory = network, factory
        self._on = torch.device("cpu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the features [B, F] of samples [B, *input_shape]."""
        if images.device != self._on:
            self._move_constants(images.device)
        features: Tensor = self.network(images)
        return features

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the factory's values."""
        return _detached(new_target(self._factory, seed_of(generator)).extractor)

    def _move_constants(self, device: torch.device) -> None:
        # Constants are outside the state dict: replacing the weights by tensors on a device leaves them behind.
        for layer in self.network.modules():
            for name in layer._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public list of them
                setattr(layer, name, getattr(layer, name).to(device))
        self._on = device


class CustomClassifier(nn.Linear, SelfInitialised):
    """The last layer of a user-supplied network.

    Args:
        layer: The original layer; its parameters are shared, not copied.
        factory: The factory that made the network.
    """

    def __init__(self, layer: nn.Linear, factory: Factory) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._factory = factory

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the factory's values."""
        return _detached(new_target(self._factory, seed_of(generator)).classifier)


class CustomTarget(Target, SelfInitialised):
    """A user-supplied network, split into extractor and classifier.

    Args:
        extractor: The part below the classifier.
        classifier: The last layer.
        factory: The factory that made the network.
        classifier_name: Name of the classifier in the factory's network.
    """

    def __init__(
        self, extractor: CustomExtractor, classifier: CustomClassifier, factory: Factory, classifier_name: str
    ) -> None:
        super().__init__(extractor, classifier)
        self._factory, self.classifier_name = factory, classifier_name

    def draw_values(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the factory's values."""
        return _detached(new_target(self._factory, seed_of(generator)))

    def original_name(self, name: str) -> str:
        """Return the name of a parameter or running statistic in the factory's network."""
        part, _, rest = name.partition(".")
        return f"{self.classifier_name}.{rest}" if part == "classifier" else rest.removeprefix("network.")


def build_custom(name: str, input_shape: tuple[int, ...], num_classes: int) -> CustomTarget:
    """Build a user-supplied target: parameters and running statistics on the meta device, constants with values.

    The factory is called once per process and shape. See `hyperfl_flwr.models.targets.build_target`.
    """
    factory = Factory(name, tuple(map(int, input_shape)), int(num_classes))
    return copy.deepcopy(_template(factory, factory.find()))


@functools.lru_cache(maxsize=8)
def _template(factory: Factory, _: Callable[..., object]) -> CustomTarget:
    """Return a network on the meta device; the found function is another one where another source was found since."""
    target = new_target(factory, 0)
    for layer in target.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, device="meta")))
        if isinstance(layer, AnyBatchNorm):
            for name, buffer in layer.named_buffers(recurse=False):
                setattr(layer, name, torch.empty(buffer.shape, device="meta"))
    return target


def new_target(factory: Factory, seed: int) -> CustomTarget:
    """Make the factory's network under a seed, and split it; parameters have their initial values.

    Raises:
        ConfigError: If the factory fails, or its network cannot be split.
    """
    network = factory.call(seed)
    _exchange_layers(network, factory)
    own = [name for name, layer in network.named_modules() if next(layer.parameters(recurse=False), None) is not None]
    last = network.get_submodule(own[-1])
    if not isinstance(last, nn.Linear) or last.out_features != factory.num_classes:
        raise factory.problem(
            f"the last module with parameters must be the classifier, torch.nn.Linear with {factory.num_classes} "
            f"outputs; it is {own[-1] or 'the network itself'}, {last}. Define the classifier last in the network"
        )
    if len(own) == 1:
        raise factory.problem("the classifier is the only layer with parameters; add a trainable layer below it")
    parent, _, leaf = own[-1].rpartition(".")
    setattr(network.get_submodule(parent), leaf, nn.Identity())
    return CustomTarget(CustomExtractor(network, factory), CustomClassifier(last, factory), factory, own[-1])


def _exchange_layers(network: nn.Module, factory: Factory) -> None:
    """Replace torch's dropout and BatchNorm layers by ours, and turn other layers' buffers into constants."""
    ours: dict[int, nn.Module] = {}
    # A layer that is used in several places has several names here, and must stay one layer: hence the ids.
    for name, layer in list(network.named_modules(remove_duplicate=False)):
        if type(layer) in _DROPOUT or type(layer) in WITHOUT_COUNTER:
            parent, _, leaf = name.rpartition(".")
            ours.setdefault(id(layer), _ours(layer, name, factory))
            setattr(network.get_submodule(parent), leaf, ours[id(layer)])
    for name, layer in network.named_modules():
        if isinstance(layer, AnyBatchNorm) and type(layer) not in (*WITHOUT_COUNTER, *WITHOUT_COUNTER.values()):
            raise factory.problem(
                f"{name} is a {type(layer).__name__}, which is not supported; use BatchNorm1d, BatchNorm2d or "
                f"BatchNorm3d"
            )
        if not isinstance(layer, AnyBatchNorm):
            for key, buffer in layer.named_buffers(recurse=False):
                layer.register_buffer(key, buffer, persistent=False)


def _ours(layer: nn.Module, name: str, factory: Factory) -> nn.Module:
    if type(layer) in _DROPOUT:
        try:
            return Dropout(float(layer.p), maps=_DROPOUT[type(layer)]) if layer.p else nn.Identity()  # type: ignore[arg-type]
        except ValueError as error:
            raise factory.problem(f"{name}: {error}") from None
    assert isinstance(layer, AnyBatchNorm)
    if layer.momentum is None and layer.track_running_stats:
        raise factory.problem(f"{name} needs a momentum: cumulative averages are not supported; pass a number")
    if not layer.track_running_stats:
        return layer
    replacement = WITHOUT_COUNTER[type(layer)](layer.num_features, layer.eps, layer.momentum or 0.1, layer.affine)
    replacement.load_state_dict(
        {key: value for key, value in layer.state_dict().items() if key != "num_batches_tracked"}
    )
    return replacement


def seed_of(generator: torch.Generator) -> int:
    """Draw a seed for a factory from a generator."""
    return int(torch.randint(2**62, (), generator=generator))


def _detached(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.state_dict().items()}
