"""The layers of a pipeline as one module: a sequence, with names and state dicts of the model.

The devices are chosen at construction, so methods that move parameters raise an error.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import is_cpu, memory_of
from torchgpipe.base.settings import Checkpoint
from torchgpipe.engine.split import still_shared

TSequence = TypeVar('TSequence', bound='LayerSequence')


class LayerSequence(nn.Module):
    """A module whose children are the layers of a pipeline, under the names of the model."""

    devices: list[torch.device]
    balance: list[int]
    chunks: int
    checkpoint: Checkpoint
    _names: tuple[str, ...]

    @property
    def partitions(self) -> nn.ModuleList:
        """One :class:`torch.nn.Sequential` per partition."""
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A pickle of an earlier version has no rules for batches.
        known = tuple(map(state['_modules'].get, state['_names']))
        super().__setstate__(
            {  # type: ignore[no-untyped-call]
                'batch_dim': 0,
                'gather': None,
                'offload': False,
                '_known': known,
                '_schedule': None,
                **state,
            }
        )

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([layer for layer in self._layers() if layer is not None])

    def __getitem__(self, index: int) -> Any:
        layer = self._layers()[index]
        if layer is None:
            raise IndexError(f"layer {index}, '{self._names[index]}', is on another rank")
        return layer

    def _layers(self) -> list[nn.Module | None]:
        self.partitions  # Raises if one of them has other layers.
        return [self._modules.get(name) for name in self._names]

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its name, including a layer with the name of an attribute.

        >>> from collections import OrderedDict
        >>> from torchgpipe import GPipe
        >>> model = nn.Sequential(OrderedDict(chunks=nn.Linear(2, 2)))
        >>> GPipe(model, [1], devices=['cpu']).get_parameter('chunks.bias').shape
        torch.Size([2])
        """
        name, _, rest = target.partition('.')
        layer = self._modules.get(name)
        if layer is None:
            return super().get_submodule(target)
        return layer.get_submodule(rest)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each partition, with the arguments of :func:`torch.compile`.

        ``torch.compile(model)`` compiles nothing by itself, because a pipeline passes
        micro-batches to other threads. Partitions and layers that were compiled before stay
        compiled.
        """
        for partition in self.partitions:
            partition.compile(*args, **kwargs)

    def train(self: TSequence, mode: bool = True) -> TSequence:
        """Set training or evaluation mode."""
        super().train(mode)
        self.partitions.train(mode)
        return self

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict; shared tensors stay shared, even if tensors are assigned."""
        with still_shared(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Keys of 0.0.7 are `partitions.<j>.<layer>.…`, from any balance.
        old = prefix + 'partitions.'
        for key in [key for key in state_dict if key.startswith(old)]:
            name = key[len(old) :].partition('.')[2]
            if name.partition('.')[0] in self._names:
                state_dict.setdefault(prefix + name, state_dict.pop(key))
        from torchgpipe.sequential.parts import to_own_names  # no plain call needs it

        to_own_names(state_dict, prefix, self._modules)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the distribution of the layers as text."""
        devices = [str(device) for device in self.devices]
        return (
            f'balance={self.balance}, devices={devices}, chunks={self.chunks}, '
            f'checkpoint={self.checkpoint!r}'
        )

    def cuda(self: TSequence, device: Any = None) -> TSequence:
        """Same as ``to('cuda')``, or with an index ``to('cuda:1')``: see :meth:`to`."""
        if device is None:
            device = 'cuda'
        elif isinstance(device, int):
            device = torch.device('cuda', device)
        return self.to(device)

    def cpu(self: TSequence) -> TSequence:
        """Same as ``to('cpu')``: see :meth:`to`."""
        return self.to('cpu')

    def to(self: TSequence, *args: Any, **kwargs: Any) -> TSequence:
        """Change the dtype of parameters and buffers, or raise a :exc:`TypeError` for a device.

        The device that already has all of them is allowed.

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
        # All CPU devices share one memory. A device without an index is the current device.
        return is_cpu(device) or {torch.empty(0, device=device).device} == {*self.devices}

    def _apply(self: TSequence, fn: Any, recurse: bool = True) -> TSequence:
        # A parent module moves this one without a call of any method above.
        for device in {*map(memory_of, self.devices)}:
            probe = torch.empty(1, device=device)
            if fn(probe).device != probe.device:
                raise _denied()
        with still_shared(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _denied() -> TypeError:
    return TypeError(
        'denied to move parameters and buffers, because GPipe should manage device '
        'placement; name the devices when you make it: GPipe(module, balance, '
        'devices=…), or the mesh of a DistributedGPipe'
    )
