"""A device that exists only in tests: it refuses and counts what a GPU refuses and what makes the CPU wait for a GPU.

A `Pretended` tensor holds its numbers in a CPU tensor and reports the device `meta:0`, which no tensor of torch has.
While a `PretendedDevice` is active, every operator is checked before it computes with the CPU tensors:

- operands on different devices raise an error, except where CUDA allows them: a CPU scalar in a pointwise operator, CPU
  positions of a tensor on the device, and copies;
- random numbers drawn on the device raise an error, since they would not be those of the CPU;
- reads by the host, and copies in both directions, are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("meta:0")
"""The pretended device. Networks without values are on `meta`, which is another device."""

aten = torch.ops.aten

COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A transfer between the CPU and the pretended device.

    Attributes:
        operator: Name of the operator.
        num_bytes: Size of what was transferred; 0 if unknown, where the host waits for a size or a truth value.
        to_host: Whether the host waited for the device; if not, it sent something.
    """

    operator: str
    num_bytes: int
    to_host: bool


class MixedDevicesError(RuntimeError):
    """An operator got tensors on several devices, or random numbers of the wrong one."""


class Pretended(Tensor):
    """A tensor on the pretended device, with its numbers in the CPU tensor `numbers`."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Pretended":
        made = Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, layout=numbers.layout, device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.numbers = numbers
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretended({self.numbers!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MixedDevicesError(f"{func} uses a tensor on the pretended device, which is not active")


class PretendedDevice(TorchDispatchMode):
    """Activates the pretended device, as a context manager.

    Attributes:
        transfers: All transfers so far.
    """

    def __init__(self, transfers: list[Transfer] | None = None) -> None:
        super().__init__()
        self.transfers: list[Transfer] = [] if transfers is None else transfers
        self._factories = _Factories()

    def __enter__(self) -> "PretendedDevice":
        self._factories.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        self._factories.__exit__(*problem)

    def elsewhere(self) -> "PretendedDevice":
        """Return the same device for another thread, in which it must be activated, too."""
        return PretendedDevice(self.transfers)

    def reads(self) -> list[Transfer]:
        """Return the transfers for which the host waited."""
        return [transfer for transfer in self.transfers if transfer.to_host]

    def sent(self) -> list[Transfer]:
        """Return the transfers to the device."""
        return [transfer for transfer in self.transfers if not transfer.to_host]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, Pretended)]
        asked = kwargs.get("device")
        if not there and asked != DEVICE:
            return func(*args, **kwargs)
        if func in COPIES:
            self._count_copy(func, args, asked)
        elif there:
            self._check_operands(func, args, tensors)
            self._count_reads(func, args, there)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MixedDevicesError(f"{func} draws random numbers on the device, which differ from the CPU's")
        if asked is not None and asked != DEVICE and asked.type == "meta":
            raise MixedDevicesError(f"{func} makes a tensor without values from one on the device")
        if asked == DEVICE:
            kwargs["device"] = torch.device("cpu")
        found = func(*pytree.tree_map(_numbers_of, args), **pytree.tree_map(_numbers_of, kwargs))
        if torch.Tag.inplace_view in func.tags:
            return return_and_correct_aliasing(func, args, kwargs, found)  # the shape of the first argument changes
        if func is aten.copy_.default or _changes_first(func):
            return args[0]
        if asked is not None and asked != DEVICE:  # a copy to the CPU
            return found
        return pytree.tree_map(_pretended, found)

    def _check_operands(self, func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        outside = [tensor for tensor in tensors if not isinstance(tensor, Pretended)]
        if not outside:
            return
        if func in INDEXED and isinstance(args[0], Pretended) and all(_is_in(args[1], each) for each in outside):
            for positions in outside:
                self.transfers.append(Transfer(operator=str(func), num_bytes=positions.nbytes, to_host=False))
            return
        scalars = torch.Tag.pointwise in func.tags and all(each.ndim == 0 for each in outside)
        if not scalars or (_changes_first(func) and not isinstance(args[0], Pretended)):
            shapes = ", ".join(f"{list(each.shape)} on {each.device}" for each in tensors)
            raise MixedDevicesError(f"{func} got tensors on two devices: {shapes}")

    def _count_copy(self, func: Any, args: Sequence[Any], asked: torch.device | None) -> None:
        source = args[1] if func is aten.copy_.default else args[0]
        target = isinstance(args[0], Pretended) if func is aten.copy_.default else asked in (None, DEVICE)
        if isinstance(source, Pretended) != target:
            self.transfers.append(Transfer(operator=str(func), num_bytes=source.nbytes, to_host=not target))

    def _count_reads(self, func: Any, args: Sequence[Any], there: Sequence[Tensor]) -> None:
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if func in INDEXED:
            waits = any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if isinstance(each, Tensor))
        if waits:
            size = there[0].nbytes if func is aten._local_scalar_dense.default else 0
            self.transfers.append(Transfer(operator=str(func), num_bytes=size, to_host=True))


class _Factories(TorchFunctionMode):
    """Does what torch cannot do for such tensors.

    `torch.tensor` and `torch.as_tensor` send CPU values, which torch drops for `meta`; `tolist` copies first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if func is Tensor.tolist and isinstance(args[0], Pretended):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


def _numbers_of(leaf: Any) -> Any:
    return leaf.numbers if isinstance(leaf, Pretended) else leaf


def _pretended(leaf: Any) -> Any:
    return Pretended(leaf) if isinstance(leaf, Tensor) else leaf


def _is_in(positions: Any, tensor: Tensor) -> bool:
    return any(each is tensor for each in positions)


def _changes_first(func: Any) -> bool:
    """Return whether an operator writes to its first argument and returns it."""
    arguments = func._schema.arguments
    return bool(arguments and arguments[0].alias_info is not None and arguments[0].alias_info.is_write)
