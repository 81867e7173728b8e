"""The split: verify a sequential module, and distribute its layers over devices."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from torchgpipe.base.devices import (
    Device,
    accelerators,
    current_device,
    is_cpu,
    memory_key,
    memory_of,
    parse_device,
)
from torchgpipe.base.private import hooks_of
from torchgpipe.base.structure import Slot, size_of
from torchgpipe.engine.cell import Sequential
from torchgpipe.engine.partition import holder_of, is_pipeline, modules_of, named_slots, tensor_of

_RECOMMENDATION = """

Let torchgpipe.balance find a balance that fits:

    from torchgpipe import GPipe
    from torchgpipe.balance import balance_by_time

    sample = torch.rand(...)  # one mini-batch
    balance = balance_by_time(torch.accelerator.device_count(), model, sample)
    model = GPipe(model, balance, chunks=...)
"""


def verify_module(module: nn.Module) -> None:
    """Check that a module can be partitioned.

    Raises:
        TypeError: It is not an :class:`torch.nn.Sequential`, or has its own forward.
        ValueError: It has its own parameters, buffers or hooks, or a child has a reserved name.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            'module must be nn.Sequential to be partitioned, but got '
            f'{type(module).__name__}; torchgpipe.sequential.to_sequential(module, '
            'sample) makes it one, or list its layers: nn.Sequential(model.first, '
            '*model.blocks, model.last)'
        )
    _verify_plain(module)
    # Code that goes through attributes would confuse the two without an error.
    if 'partitions' in module._modules:
        raise ValueError(
            "a layer to be partitioned cannot be called 'partitions', which is what "
            'a GPipe calls its parts; give it another name'
        )


def _verify_plain(module: nn.Sequential) -> None:
    """Raise if the module does more than its layers, because only the layers are run."""
    plain = nn.Sequential.forward, Sequential.forward
    if type(module).forward not in plain or 'forward' in module.__dict__:
        raise TypeError(
            f'module must be nn.Sequential to be partitioned, but '
            f'{type(module).__name__} has a forward of its own; make what it does '
            'beside running the layers a layer'
        )
    if module._parameters or module._buffers:
        names = [*module._parameters, *module._buffers]
        raise ValueError(
            'a sequential module to be partitioned has its parameters and buffers in '
            f'its layers, but this one has some of its own: {names}; move them into '
            'the layer that uses them'
        )
    if any(hooks_of(module)):
        raise ValueError(
            'a sequential module to be partitioned cannot have hooks of its own; '
            'register them on its layers, or on the GPipe'
        )
    for name, layer in module._modules.items():
        if layer is None:
            raise ValueError(f"layer '{name}' is None")


def verify_layers(module: nn.Sequential) -> None:
    """Check that all modules within can run in a pipeline.

    Raises:
        TypeError: A module is a TorchScript module.
        ValueError: A module is lazy, and has not seen its first input.
    """
    for name, part in module.named_modules():
        if isinstance(part, ScriptModule):
            raise TypeError(
                f"'{name}' is a module of TorchScript, which cannot be in a pipeline; "
                'wrap the module as it was before it was scripted or traced'
            )
    for name, slot, tensor in named_slots(module):
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' of a {type(slot[0]).__name__} has no shape yet; call the "
                'module once, with a sample, before it is wrapped'
            )


def verify_shared(
    module: nn.Sequential,
    balance: Sequence[int],
    devices: Sequence[torch.device],
) -> None:
    """Check that all layers that share a tensor can use it.

    Raises:
        ValueError: A layer within another GPipe shares a tensor with another device, or is also
            elsewhere in the module.
    """
    inner: set[nn.Module] = set()
    for pipeline in filter(is_pipeline, module.modules()):
        _verify_alone(module, pipeline)
        inner.update(pipeline.modules())
    device_of_layers: list[torch.device] = []
    for number, device in zip(balance, devices):
        device_of_layers += [device] * number

    first: dict[int, tuple[str, torch.device, nn.Module]] = {}
    for (prefix, layer), device in zip(module._modules.items(), device_of_layers):
        for name, (owner, _), tensor in named_slots(layer, prefix):
            first_name, home, first_owner = first.setdefault(id(tensor), (name, device, owner))
            if memory_key(home) == memory_key(device):
                continue
            # The layers of a pipeline within cannot have copies: it runs them by its own engine.
            if first_owner in inner or owner in inner:
                raise ValueError(
                    'module with duplicate parameters in distinct children is not supported on '
                    f"different devices within another GPipe: '{first_name}' on {home} is also "
                    f"'{name}' on {device}; put both on one device, or their layers into one "
                    'GPipe'
                )


def _verify_alone(module: nn.Module, pipeline: nn.Module) -> None:
    """Check that the layers of a pipeline are nowhere else in the module.

    The pipeline has its own locks and workers. A cell around it would hold the lock for which a
    worker within waits.
    """
    outside = set(modules_of(module)) - {pipeline}
    for layer in outside.intersection(pipeline.modules()):
        places = []
        for name, child in module.named_modules(remove_duplicate=False):
            if child is layer:
                places.append(f"'{name}'")
        raise ValueError(
            'the layers of a GPipe within a GPipe can stand nowhere else, but '
            f'{" and ".join(places)} are one {type(layer).__name__}; give each place a module of '
            'its own'
        )


def parse_balance(
    balance: Iterable[int] | None,
    layers: int,
) -> list[int]:
    """Check a balance against the number of layers.

    Raises:
        ValueError: It is missing, does not add up to ``layers``, or has a number below 1.
        TypeError: It contains a value that is not an integer.
    """
    if balance is None:
        raise ValueError(
            'balance is required: the number of layers in each partition, which add '
            f'up to {layers}' + _RECOMMENDATION
        )
    try:
        numbers = list(balance)
    except TypeError:
        raise TypeError(
            f'balance must be an iterable of integers, one per partition, but got {balance!r}'
        ) from None
    for j, number in enumerate(numbers):
        # NumPy's integers have an index as well. `True` counts as 1, but is no number of layers.
        if isinstance(number, bool) or not hasattr(number, '__index__'):
            raise TypeError(
                f'balance must be made of integers, but partition {j} has {number!r} '
                f'layers (balance: {numbers})'
            )
    try:
        numbers = [number.__index__() for number in numbers]
    except TypeError:
        raise TypeError(f'balance must be made of integers, but is {numbers}') from None
    if sum(numbers) != layers:
        more = ''
        if sum(numbers) > layers:
            more = "; where to_sequential has made them, it makes more by grain='layer'"
        raise ValueError(
            f'module and sum of balance have different length: {layers} layers, but '
            f'the balance {numbers} adds up to {sum(numbers)}{more}{_RECOMMENDATION}'
        )
    if any(number < 1 for number in numbers):
        raise ValueError(
            'all balance numbers must be positive integers: each partition has at '
            f'least one layer (balance: {numbers})' + _RECOMMENDATION
        )
    return numbers


def verify_source(balance: Any, module: nn.Module) -> None:
    """Check that a balance with names of layers was made for this module.

    Raises:
        ValueError: The layers have other names, or other sizes of parameters.
    """
    expected = getattr(balance, 'layers', None)
    if not (isinstance(expected, tuple) and expected):  # A formula names no layers.
        return
    layers = module._modules.items()
    if len(expected) != len(layers):
        raise _other_module(f'it had {len(expected)} layers, this one has {len(layers)}')
    for (name, size), (layer_name, layer) in zip(expected, layers):
        layer_size = sum(map(size_of, cast(nn.Module, layer).parameters()))
        if name != layer_name or size != layer_size:
            raise _other_module(
                f"there a layer was '{name}' with {size} bytes of parameters, "
                f"here it is '{layer_name}' with {layer_size}"
            )


def _other_module(difference: str) -> ValueError:
    return ValueError(
        'the balance comes from a profile of another module, or of another dtype: '
        f'{difference}. Profile this module, or pass list(balance) to use the '
        'numbers all the same'
    )


def parse_chunks(chunks: int | str | Any) -> int:
    """Return a number of micro-batches."""
    try:
        number = int(chunks)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(
            f'number of chunks must be a positive integer, but got {chunks!r}'
        ) from None
    if number < 1:
        raise ValueError(f'number of chunks must be a positive integer, but got {number}')
    return number


def verify_counts(module: nn.Module) -> None:
    """Check that no layer counts indices over the whole mini-batch.

    Raises:
        ValueError: An embedding scales its gradient by the frequency of indices.
    """
    for name, part in module.named_modules():
        if getattr(part, 'scale_grad_by_freq', False):
            raise ValueError(
                f"'{name}' scales its gradient by the frequency of indices in the "
                'mini-batch (scale_grad_by_freq=True), but it sees one micro-batch '
                'at a time. Use chunks=1, or an embedding without this option'
            )


def parse_seed(seed: Any) -> int:
    """Return a seed as an integer.

    Raises:
        TypeError: It is not an integer.
    """
    if isinstance(seed, bool) or not hasattr(seed, '__index__'):
        raise TypeError(f'seed must be an integer, but got {seed!r}')
    return int(seed.__index__())


def parse_devices(
    devices: Iterable[Device] | None,
    partitions: int,
) -> list[torch.device]:
    """Resolve one device per partition; by default all devices of the accelerator.

    Raises:
        IndexError: There are fewer devices than partitions.
        ValueError: A device is unknown or not on this machine.
    """
    if devices is None:
        devices = accelerators()
    elif isinstance(devices, (str, int, torch.device)):
        raise TypeError(
            f'devices must be an iterable of devices, one per partition: [{devices!r}]'
        )
    names = list(devices)
    if len(names) < partitions:
        raise IndexError(
            'too few devices to hold given partitions '
            f'(devices: {len(names)}, partitions: {partitions}); name one per '
            "partition, one of them twice if need be: devices=['cpu', 'cpu']"
        )
    return list(map(_resolve, names[:partitions]))


def _resolve(device: Device) -> torch.device:
    resolved = parse_device(device)
    if is_cpu(resolved):
        return resolved
    available = accelerators()
    if available and resolved == torch.device(available[0].type):
        # The current device now, not at each call.
        return current_device()
    if resolved not in available:
        names = 'no accelerator'
        if available:
            names = f"'{available[0]}' to '{available[-1]}'"
        raise ValueError(
            f"a pipeline cannot run on device '{resolved}'; there are the CPU and "
            f'{names} on this machine'
        )
    return resolved


def split(
    module: nn.Sequential,
    balance: Sequence[int],
    devices: Sequence[torch.device],
) -> list[nn.Sequential]:
    """Split a verified module by a checked balance, and move each partition to its device.

    Layers keep their names. Tensors that several layers share stay shared, on the device of the
    first one. All CPU devices share one memory, so ``cpu:1`` moves nothing.
    """
    # By name, not by `children()`, which leaves out a layer that is in two places.
    layers = iter(module._modules.items())
    partitions: list[Any] = []
    for number in balance:
        partitions.append(Sequential(OrderedDict(islice(layers, number))))
    with still_shared(module):
        # A parameter moves with each partition that has it, the first one last.
        for partition, device in zip(reversed(partitions), reversed(devices)):
            partition.training = module.training
            partition.to(memory_of(device))
    return partitions


@contextmanager
def still_shared(module: nn.Module) -> Iterator[None]:
    """Keep tensors shared between modules while they are moved or get another type.

    PyTorch makes a new buffer for each module that has it, because it converts modules one by one.
    """
    first_slots: dict[int, Slot] = {}
    repeated: list[tuple[Slot, Slot]] = []
    for _, slot, tensor in named_slots(module):
        first_slot = first_slots.setdefault(id(tensor), slot)
        if slot != first_slot:
            repeated.append((slot, first_slot))
    yield
    for slot, first_slot in repeated:
        holder_of(slot)[slot[1]] = tensor_of(first_slot)
