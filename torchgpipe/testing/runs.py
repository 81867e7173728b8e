"""Train a copy of a model for some steps, wrapped or not, and record all results.

Three forms of one model, from the same state, sample and seeds::

    Unwrapped   layer after layer, on the mini-batch
    InParts     layer after layer, on one micro-batch after the other
    Wrapped     a GPipe
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import memory_of
from torchgpipe.base.distance import default_tolerance, is_real
from torchgpipe.base.errors import add_note
from torchgpipe.base.structure import call, flatten, flatten_nested, is_among, leaves_of, path_name
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.engine.cell import Sequential
from torchgpipe.engine.microbatches import Chunk, cut, gather
from torchgpipe.gpipe import GPipe
from torchgpipe.skip.transfer import Namespace, SkipTracker, use_skip_tracker

#: The kinds of tensors that a step results in.
RESULTS = ('outputs', 'gradients', 'buffers', 'parameters')

#: Copies of tensors on the CPU, by kind and name.
Record = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Setup:
    """A model, its input, and the options of its training.

    Attributes:
        options: Other arguments for it, including ``devices`` and ``chunks``; and the ``schedule``
            of a step, or ``None`` for the plain call.
        dtype: The type of the copies; ``None`` for the model's own types.
    """

    module: nn.Sequential
    sample: Any
    balance: Sequence[int]
    options: dict[str, Any]
    loss_fn: Callable[..., Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    dtype: torch.dtype | None
    quiet: frozenset[str] = frozenset()
    target: Any = None
    normalizer: Any = None

    def model(self) -> nn.Sequential:
        """Copy the module."""
        model = copy.deepcopy(self.module)
        for x in (*model.parameters(), *model.buffers()):
            x.data = self._cast(x.data)
        for name in self.quiet:
            model.get_submodule(name).training = False
        return model

    def input(self) -> Any:
        """Copy the sample, to the first device."""
        return self._copy(self.sample, self.device_of(0))

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of an output."""
        if self.target is None:
            return self.loss_fn(output)
        return self.loss_fn(output, target)

    def loss_of_mini_batch(self, output: Any, target: Any) -> Tensor:
        """Return the loss of the output of the mini-batch."""
        loss = self.loss(output, target)
        if self.normalizer is not None and not callable(self.normalizer):
            loss = loss / self.normalizer
        return loss

    def copy_of_target(self) -> Any:
        """Copy the target, to the last device."""
        return self._copy(self.target, self.device_of(-1))

    def _copy(self, value: Any, device: torch.device) -> Any:
        tensors = [leaf.value for leaf in leaves_of(value) if isinstance(leaf.value, Tensor)]
        copies = {
            id(x): self._cast(x.detach()).to(device, copy=True).requires_grad_(x.requires_grad)
            for x in tensors
        }
        return copy.deepcopy(value, copies)  # It finds these copies in its memo.

    def _cast(self, x: Tensor) -> Tensor:
        if self.dtype is None or not is_real(x):
            return x
        return x.to(self.dtype.to_complex() if x.is_complex() else self.dtype)

    @property
    def rounding(self) -> float:
        """The tolerance for rounding in ``dtype``, or in the coarsest type if it is ``None``."""
        if self.dtype is not None:
            return default_tolerance(self.dtype)
        sample = [leaf.value for leaf in leaves_of(self.sample) if isinstance(leaf.value, Tensor)]
        types = {
            x.dtype.to_real()
            for x in (*self.module.parameters(), *self.module.buffers(), *sample)
            if is_real(x)
        }
        return max(map(default_tolerance, types or {torch.get_default_dtype()}))

    def device_of(self, j: int) -> torch.device:
        """Return the device of a partition's tensors; all CPU devices are one."""
        return memory_of(self.options['devices'][j])


class Unwrapped:
    """The unwrapped model on the mini-batch."""

    name = 'the unwrapped model'

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = self.make(setup.model())
        trained = [x for x in self.model.parameters() if x.requires_grad]
        self._optimizer = setup.optimizer(trained) if trained else None

    def make(self, model: nn.Sequential) -> nn.Module:
        """Prepare a copy."""
        self._layers = Sequential(*model)
        return model.to(self.setup.device_of(0))

    def run(self, value: Any) -> Any:
        """Call it."""
        tensors, kind = flatten_nested(value)
        return call(self._layers, kind(tensors))

    def forward(self, step: int) -> tuple[Any, Any]:
        """Call the model with the sample, in some step; return input and output."""
        torch.manual_seed(step)
        input = self.setup.input()
        return input, self.run(input)

    def step(self, step: int) -> Record:
        """Train the model for a step, counted from 0."""
        try:
            return self._step(step)
        except Exception as error:
            add_note(
                error,
                f'in step {step + 1} of {self.name}, which check_parity runs in '
                f'{self.setup.dtype or "its own dtype"}',
            )
            raise

    def train(self, step: int) -> tuple[Any, Any, Tensor]:
        """Compute the gradients of a step; return input, output and loss."""
        input, output = self.forward(step)
        tensors, kind = flatten(output)
        output_of_loss = kind([x.to(self.setup.device_of(-1)) for x in tensors])
        loss = self.setup.loss_of_mini_batch(output_of_loss, self.setup.copy_of_target())
        if loss.requires_grad:
            loss.backward()
        return input, output, loss

    def _step(self, step: int) -> Record:
        self.model.zero_grad()
        input, output, loss = self.train(step)
        record = {('outputs', 'loss'): loss, **_tensors('outputs', 'output', output)}
        grads = _tensors('gradients', 'input', input)
        grads |= {('gradients', name): x for name, x in self.model.named_parameters()}
        # A tensor without a gradient has no entry.
        record |= {key: x.grad for key, x in grads.items() if x.grad is not None}
        record = {key: _keep(x) for key, x in record.items()}
        if self._optimizer is not None:
            self._optimizer.step()
        for kind_name, named in (
            ('buffers', self.model.named_buffers()),
            ('parameters', self.model.named_parameters()),
        ):
            record |= {(kind_name, name): _keep(x) for name, x in named}
        return record


class InParts(Unwrapped):
    """The layers of the unwrapped model on micro-batches, in one thread, without recomputation.

    Each partition runs on its device in a pipeline, because each device has its own random
    numbers. Parameters stay on the first device, and other devices use copies of them.
    """

    name = 'the unwrapped layers on micro-batches'

    def make(self, model: nn.Sequential) -> nn.Module:
        """Prepare a copy."""
        options = self.setup.options
        if options.get('deferred_batch_norm'):
            m = len(cut(self.setup.sample, int(options['chunks']), options.get('batch_dim', 0))[0])
            model = DeferredBatchNorm.convert_deferred_batch_norm(model, m)
        model, layers = model.to(self.setup.device_of(0)), iter(model)
        self._partitions = [Sequential(*islice(layers, number)) for number in self.setup.balance]
        for j, partition in enumerate(self._partitions):
            for buffer in partition.buffers():
                buffer.data = buffer.data.to(self.setup.device_of(j))
        return model

    def run(self, value: Any) -> Any:
        """Call it."""
        options = self.setup.options
        batch_dim = options.get('batch_dim', 0)
        batches, sizes, common = cut(value, int(options['chunks']), batch_dim)
        carrier = _Carrier([batches[0].tensors[k] for k in common])
        with use_skip_tracker(carrier):
            outputs = [self._run(batch, carrier) for batch in batches]
        return gather(
            outputs,
            sizes,
            options.get('gather'),
            batch_dim if isinstance(batch_dim, int) else 0,
            carrier.shared,
        )

    def _run(self, batch: Chunk, carrier: '_Carrier') -> Chunk:
        """Run a micro-batch through all partitions."""
        for j, partition in enumerate(self._partitions):
            carrier.device = self.setup.device_of(j)
            run: Any = partition
            if carrier.device != self.setup.device_of(0):
                run = partial(
                    _call,
                    partition,
                    {name: x.to(carrier.device) for name, x in partition.named_parameters()},
                )
            batch = Chunk(*flatten(call(run, batch.kind([*map(carrier.carry, batch.tensors)]))))
        return batch


def _call(module: nn.Module, parameters: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return torch.func.functional_call(module, parameters, args, kwargs)


class _Carrier(SkipTracker):
    """Copies tensors of micro-batches, and their skips, to the devices that need them."""

    device = torch.device('cpu')

    def __init__(self, shared: list[Tensor]) -> None:
        super().__init__()
        self.shared = shared

    def carry(self, x: Tensor) -> Tensor:
        """Return a tensor on the current device."""
        y = x.to(self.device)
        if y is not x and is_among(x, self.shared):
            self.shared.append(y)
        return y

    def load(self, batch: Chunk, ns: Namespace | None, name: str) -> Tensor | None:
        """Return a skip tensor on the current device, and release it."""
        tensor = super().load(batch, ns, name)
        return None if tensor is None else self.carry(tensor)


class Wrapped(Unwrapped):
    """The model in a GPipe."""

    name = 'the wrapped model'

    def make(self, model: nn.Sequential) -> nn.Module:
        """Prepare a copy."""
        options = dict(self.setup.options)
        self._schedule = options.pop('schedule', None)
        return GPipe(model, self.setup.balance, **options)

    def train(self, step: int) -> tuple[Any, Any, Tensor]:
        """Compute gradients by the plain call, or by a step if there is a schedule."""
        if self._schedule is None:
            return super().train(step)
        torch.manual_seed(step)
        input = self.setup.input()
        model: Any = self.model
        # Without a wrapper where possible, as a step knows the losses of PyTorch.
        loss_fn = self.setup.loss if self.setup.target is None else self.setup.loss_fn
        loss, output = model.step(
            input,
            self.setup.copy_of_target(),
            loss_fn,
            schedule=self._schedule,
            normalizer=self.setup.normalizer,
            return_output=True,
        )
        return input, output, loss

    def run(self, value: Any) -> Any:
        """Call it."""
        return call(self.model, value)


def _tensors(kind: str, name: str, value: Any) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of a value by their paths."""
    return {
        (kind, name + path_name(leaf.path)): leaf.value
        for leaf in leaves_of(value)
        if isinstance(leaf.value, Tensor)
    }


def _keep(x: Tensor) -> Tensor:
    x = x.detach()
    return (x if x.layout is torch.strided else x.to_dense()).cpu()
