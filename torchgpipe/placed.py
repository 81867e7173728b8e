"""A module of layers that stay where they are: a sequence of them, under their own names.

[Note: Two views of the layers]
The layers are registered as children under their own names, so that all that goes by names speaks
those of the module, whatever the balance. Partitions are a second view of the same layers, and no
child. They follow where a child is replaced, as tools do that go by names; the children can not
follow, as nobody asks before he takes parameters from them. Where a layer has the name of an
attribute of the class, `model.name` is the attribute, and what takes names as strings finds the
layer.
"""
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.devices import is_cpu, memory_of
from torchgpipe.original import run_by
from torchgpipe.sequential.convert import not_sequential
from torchgpipe.sequential.parts import to_own_names
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.split import split, still_shared, verify_module, verify_shared

__all__ = ['Placed', 'verify']

TPlaced = TypeVar('TPlaced', bound='Placed')


class Placed(nn.Module):
    """What :class:`~torchgpipe.GPipe` is as a module."""

    devices: list[torch.device]
    balance: list[int]
    _engine: Any
    _names: tuple[str, ...]
    _known: tuple[nn.Module, ...]

    def _place(self, module: nn.Sequential, partitions: nn.ModuleList) -> None:
        """Take the layers of a module: [Note: Two views of the layers]."""
        self.training = partitions.training = module.training
        self.__dict__['partitions'] = partitions
        self.__dict__['_names'] = tuple(module._modules)
        self.__dict__['_known'] = tuple(module._modules.values())
        self._modules.update(module._modules)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of an earlier version has no rules for batches.
        known = tuple(map(state['_modules'].get, state['_names']))
        super().__setstate__({  # type: ignore[no-untyped-call]
            'batch_dim': 0, 'gather': None, 'offload': False, '_known': known, '_schedule': None,
            **state})

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts with no threads.
        return {**self.__dict__, '_engine': None}

    def _replace(self, layers: 'OrderedDict[str, Any]', partitions: nn.ModuleList) -> None:
        module = nn.Sequential(layers)
        verify(module)
        verify_shared(module, self.balance, self.devices)
        for new, own in zip(split(module, self.balance, self.devices), partitions):
            own._modules.update(new._modules)
        self._known = tuple(layers.values())
        self._engine = None

    @property
    def partitions(self) -> nn.ModuleList:
        """One module per device."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def __getitem__(self, index: int) -> nn.Module:
        return self._layers()[index]

    def _layers(self) -> list[nn.Module]:
        return [layer for partition in self.partitions
                for layer in partition._modules.values() if layer is not None]

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name, also a layer that has the name of an attribute of this.

        >>> from collections import OrderedDict
        >>> from torchgpipe import GPipe
        >>> model = nn.Sequential(OrderedDict(chunks=nn.Linear(2, 2)))
        >>> GPipe(model, [1], devices=['cpu']).get_parameter('chunks.bias').shape
        torch.Size([2])
        """
        name, _, rest = target.partition('.')
        layer = self._modules.get(name)
        return super().get_submodule(target) if layer is None else layer.get_submodule(rest)

    def in_place_of(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model that was converted is run by this pipeline.

        Its names, ``state_dict``, configuration and methods stay its own, and so do its parameters
        and buffers, which are those of the layers. So what trains, saves and loads that model does
        so with the pipeline. Afterwards the model runs itself.

        >>> from torchgpipe import GPipe
        >>> from torchgpipe.sequential import to_sequential
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        ...
        ...     def forward(self, x):
        ...         return self.last(self.first(x).relu())
        >>> net, x = Net(), torch.rand(8, 3)
        >>> model = GPipe(to_sequential(net, x), [1, 1], devices=['cpu', 'cpu'], chunks=4)
        >>> with model.in_place_of(net):
        ...     net(x).sum().backward()
        >>> [*net.state_dict()][0], net.first.weight.grad is model[0].first.weight.grad
        ('first.weight', True)

        Its tensors are not replaced meanwhile, only changed in place, as by an optimizer. What is
        no tensor is that of the conversion: numbers that its forward reads, as of a configuration,
        and the hooks of submodules that were cut into layers.
        Training and evaluation mode are those of the model, and of its submodules. Numbers without
        dimensions in the output, as a loss, are on the first device. ``hf_device_map`` says to
        Accelerate and transformers that the model has its devices.

        Raises:
            ValueError: The pipeline has other parameters, as of another model, or of this one
                before some were added; or the model has another forward than that of its class.
            RuntimeError: In a call: tensors of the model were replaced, added or removed.
        """
        return run_by(self, model)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each partition, with the arguments of :func:`torch.compile`.

        ``torch.compile(model)`` compiles nothing by itself, as a pipeline hands micro-batches to
        other threads. What was compiled before, partitions or layers, stays so in it.
        """
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def train(self: TPlaced, mode: bool = True) -> TPlaced:
        """Set training or evaluation mode."""
        super().train(mode)
        self.partitions.train(mode)
        return self

    def extra_repr(self) -> str:
        """Say how the layers below are distributed."""
        devices = [str(device) for device in self.devices]
        return (f'balance={self.balance}, devices={devices}, chunks={self.chunks}, '
                f'checkpoint={self.checkpoint!r}')

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
                        assign: bool = False) -> Any:
        """Load a state dict; what layers share stays shared, also where tensors are assigned."""
        with still_shared(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Keys of 0.0.7 are `partitions.<j>.<layer>.…`, from any balance.
        old = prefix + 'partitions.'
        for key in [key for key in state_dict if key.startswith(old)]:
            name = key[len(old):].partition('.')[2]
            if name.partition('.')[0] in self._names:
                state_dict.setdefault(prefix + name, state_dict.pop(key))
        to_own_names(state_dict, prefix, self._modules)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def cuda(self: TPlaced, device: Any = None) -> TPlaced:
        """Raise :exc:`TypeError`: the devices were chosen at construction."""
        raise _denied()

    def cpu(self: TPlaced) -> TPlaced:
        """Raise :exc:`TypeError`: the devices were chosen at construction."""
        raise _denied()

    def to(self: TPlaced, *args: Any, **kwargs: Any) -> TPlaced:
        """Change the dtype of parameters and buffers; to move them is a :exc:`TypeError`.

        The device where all of them are already is none to move to.

        >>> from torchgpipe import GPipe
        >>> model = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=['cpu'])
        >>> model.to('cpu', torch.float64)[0].weight.dtype
        torch.float64
        """
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            raise _denied()
        asked = args[0] if args else kwargs.get('device')
        if asked is not None and not isinstance(asked, torch.dtype):
            try:
                device = torch.device(asked)
            except RuntimeError as error:  # a device that this machine does not have
                raise _denied() from error
            if not self._is_all_on(device):
                raise _denied()
        return super().to(*args, **kwargs)

    def _is_all_on(self, device: torch.device) -> bool:
        if {device.type} != {own.type for own in self.devices}:
            return False
        # All CPU devices share one memory; and without a number it is the current device.
        return is_cpu(device) or {torch.empty(0, device=device).device} == {*self.devices}

    def _apply(self: TPlaced, fn: Any, recurse: bool = True) -> TPlaced:
        # A module that has this one as its child moves it without asking any method above.
        for device in {*map(memory_of, self.devices)}:
            probe = torch.empty(1, device=device)
            if fn(probe).device != probe.device:
                raise _denied()
        with still_shared(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _denied() -> TypeError:
    return TypeError('denied to move parameters and buffers, because GPipe should manage device '
                     'placement; name the devices when you make it: GPipe(module, balance, '
                     'devices=…)')


def verify(module: nn.Sequential) -> None:
    """Check that a module is a sequence of layers, whose skips match."""
    if not isinstance(module, nn.Sequential):
        raise not_sequential(module)
    verify_module(module)
    verify_skippables(module)
