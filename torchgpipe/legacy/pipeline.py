"""The pipeline of torchgpipe 0.0.7, created for each forward pass: micro-batches and workers."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.context import ThreadState
from torchgpipe.base.structure import Function, Kind, Tensors, bare, flatten
from torchgpipe.engine.backward_order import find_grad
from torchgpipe.engine.cell import result_of
from torchgpipe.engine.microbatches import Chunk, cut
from torchgpipe.engine.microbatches import gather as engine_gather
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.streams import AbstractStream, use_stream
from torchgpipe.engine.workers import device_key
from torchgpipe.skip.layout import SkipLayout

__all__ = [
    'Batch',
    'Pipeline',
    'Task',
    'check',
    'clock_cycles',
    'gather',
    'scatter',
    'spawn_workers',
]


class Batch:
    """One micro-batch: a tensor (then it is *atomic*), or a value with tensors in it.

    As a sequence it has its tensors, in their order in the value.

    >>> import torch
    >>> batch = Batch((torch.zeros(2, 3), torch.ones(2)))
    >>> batch.atomic, len(batch), batch[1].shape
    (False, 2, torch.Size([2]))

    Args:
        value: A tensor or a structure of tensors, of any shapes.

    Attributes:
        kind: Assembles a value like this one from other tensors.
    """

    __slots__ = ('_tensors', 'kind')

    _tensors: Tensors
    kind: Kind

    def __init__(self, value: Any) -> None:
        self._tensors, self.kind = flatten(value)

    @classmethod
    def of(cls, tensors: Tensors, kind: Kind = tuple) -> 'Batch':
        """Make a batch of some kind from its tensors; by default a tuple."""
        batch = cls.__new__(cls)
        batch._tensors = tensors
        batch.kind = kind
        return batch

    @property
    def value(self) -> Any:
        """The value; its containers are new objects."""
        return self.kind(self._tensors)

    @property
    def atomic(self) -> bool:
        """Whether the value is a tensor itself."""
        return self.kind is bare

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch; :exc:`AttributeError` otherwise."""
        if not self.atomic:
            raise AttributeError(
                f'a batch of {len(self)} tensors has no single tensor; use tensors'
            )
        return self._tensors[0]

    @property
    def tensors(self) -> Tensors:
        """The tensors of a non-atomic batch; :exc:`AttributeError` otherwise."""
        if self.atomic:
            raise AttributeError('an atomic batch has no tuple of tensors; use tensor')
        return self._tensors

    @property
    def tensor_or_tensors(self) -> Any:
        """The value, a tensor or not."""
        return self.value

    @property
    def device(self) -> torch.device:
        """The first device that is not the CPU, if any tensor is on one."""
        for tensor in self._tensors:
            if not tensor.is_cpu:
                return tensor.device
        return torch.device('cpu')

    def call(self, function: Function) -> 'Batch':
        """Call a function with the value, and make a batch of its result."""
        return Batch.of(*result_of(function(self.value)))

    def find_grad(self) -> int | None:
        """Return the index of the first tensor that requires grad, or ``None``."""
        return find_grad(self._tensors)

    def __repr__(self) -> str:
        return f'Batch({self.value!r})'

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Tensor:
        if self.atomic and index != 0:
            raise IndexError(f'index {index} into an atomic batch, which has index 0 only')
        return self._tensors[index]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError('only a whole batch can be assigned: batch[:] = tensors')
            self._set_all(tuple(value))
        else:
            self[index]  # raises if there is no such tensor
            tensors = list(self._tensors)
            tensors[index] = value
            self._tensors = tuple(tensors)

    def _set_all(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self._tensors):
            if self.atomic:
                raise IndexError(f'{len(tensors)} tensors for an atomic batch, which holds one')
            self.kind = tuple
        self._tensors = tuple(tensors)


def scatter(input: Any, chunks: int, batch_dim: Any = 0) -> list[Batch]:
    """Split a mini-batch along its batch dimension.

    >>> import torch
    >>> [len(batch.tensor) for batch in scatter(torch.zeros(7, 2), chunks=3)]
    [3, 2, 2]

    Args:
        input: A tensor of shape ``(batch, …)``, or a structure of such tensors. Scalars, and
            values in a :class:`~torchgpipe.NoChunk`, are the same for all micro-batches.
        chunks: The largest number of micro-batches.
        batch_dim: The rule for the batch dimension; ``None`` for values that are the same for all.

    Returns:
        ``min(chunks, batch)`` batches, whose sizes differ by one at most, larger ones first.

    Raises:
        TypeError: The input does not consist of tensors and plain values.
        ValueError: Batch sizes disagree, are zero, or there is no tensor to split.
    """
    return [Batch.of(batch.tensors, batch.kind) for batch in cut(input, chunks, batch_dim)[0]]


def gather(
    batches: Sequence[Batch],
    sizes: Sequence[int] | None = None,
    rule: Any = None,
    batch_dim: int = 0,
    shared: Sequence[Tensor] = (),
) -> Any:
    """Concatenate micro-batches, as the engine does.

    >>> import torch
    >>> gather([Batch(torch.zeros(2, 3)), Batch(torch.ones(1, 3))]).shape
    torch.Size([3, 3])
    """
    return engine_gather(
        [Chunk(tuple(batch), batch.kind) for batch in batches], sizes, rule, batch_dim, shared
    )


def check(input: Any) -> None:
    """Check that a value may cross a partition boundary: tensors, or a structure of them.

    >>> import torch
    >>> check((torch.zeros(2, 3), None))
    >>> check('text')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: expected Tensor, but got str as the value; ...

    Args:
        input: The value, of any shape.

    Raises:
        TypeError: The value has another type, or is a structure with another type in it.
    """
    flatten(input)


ExcInfo = tuple[type[BaseException], BaseException, TracebackType]

#: ``(True, (task, batch))`` or ``(False, exc_info)``.
Result = tuple[bool, Any]

InQueue = SimpleQueue['Task | None']
OutQueue = SimpleQueue[Result]


class Pipeline(PlainCall):
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    >>> from torchgpipe.microbatch import gather, scatter
    >>> batches = scatter(torch.ones(4, 2), chunks=2)
    >>> partitions = [nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]
    >>> Pipeline(batches, partitions).run()
    >>> gather(batches).shape
    torch.Size([4, 2])

    Args:
        batches: The micro-batches; :meth:`run` replaces each by its output.
        partitions: One after the other.
        devices: One per partition; all on the CPU by default.
        copy_streams: ``copy_streams[j][i]`` copies micro-batch ``i`` into or out of partition
            ``j``; made if missing.
        skip_layout: The source and target partition of each skip; by default, read from the
            layers.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
    """

    def __init__(
        self,
        batches: list[Batch],
        partitions: Iterable[nn.Sequential],
        devices: Sequence[torch.device] | None = None,
        copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
        skip_layout: SkipLayout | None = None,
        checkpoint_stop: int = 0,
    ) -> None:
        engine = Engine(partitions, devices, skip_layout)
        self._given = batches
        super().__init__(
            engine,
            [Chunk(tuple(batch), batch.kind) for batch in batches],
            [range(checkpoint_stop)] * len(engine.partitions),
            copy_streams,
        )

    def run(self) -> None:
        """Run all cells, and end the threads; afterwards the batches hold the outputs."""
        self._given.clear()  # So a tensor is freed when the engine does not need it any more.
        try:
            super().run()
        finally:
            self._given += [Batch.of(batch.tensors, batch.kind) for batch in self._batches]
            self._engine.workers.stop()


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, clock by clock, the cells ``(i, j)`` that run at the same time.

    These are micro-batches and partitions, if all cells take equally long.

    >>> list(clock_cycles(m=3, n=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Args:
        m: Number of micro-batches.
        n: Number of partitions.

    Yields:
        ``m + n - 1`` lists, partitions ascending within each (Huang et al., "GPipe", 2019).
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(n) if 0 <= k - j < m]


class Task:
    """A piece of work for a worker, with the state of the thread that made it.

    :func:`spawn_workers` has an example.

    Args:
        stream: The stream that is current while the task computes or finalizes.
        compute: The function that the worker calls.
        finalize: A function that the receiver of the result calls with it, if any.
    """

    __slots__ = ('_compute', '_finalize', '_state', 'stream')

    def __init__(
        self,
        stream: AbstractStream,
        *,
        compute: Callable[[], Batch],
        finalize: Callable[[Batch], None] | None,
    ) -> None:
        self.stream = stream
        self._compute = compute
        self._finalize = finalize
        self._state = ThreadState.capture()

    def compute(self) -> Batch:
        """Run the work in the state of the thread that made the task."""
        with use_stream(self.stream):
            return self._state.run(self._compute, self._state.num_threads)

    def finalize(self, batch: Batch) -> None:
        """Run the second half of the work, in the thread that got the result."""
        if self._finalize is None:
            return
        with use_stream(self.stream):
            self._finalize(batch)


def _result_of(task: Task) -> Result:
    try:
        return True, (task, task.compute())
    except BaseException:
        return False, sys.exc_info()


def _work(in_queue: InQueue, out_queue: OutQueue) -> None:
    while (task := in_queue.get()) is not None:
        results = [_result_of(task)]
        # Objects in this frame's variables would stay alive while it waits for the next task.
        del task
        out_queue.put(results.pop())


@contextmanager
def spawn_workers(
    devices: Sequence[torch.device | Any],
) -> Iterator[tuple[list[InQueue], list[OutQueue]]]:
    """Run workers within the context.

    >>> from torchgpipe.stream import CPUStream
    >>> with spawn_workers([torch.device('cpu')]) as (in_queues, out_queues):
    ...     in_queues[0].put(Task(CPUStream, compute=lambda: Batch(torch.ones(1)), finalize=None))
    ...     ok, (task, batch) = out_queues[0].get()
    >>> ok, batch.tensor
    (True, tensor([1.]))

    Args:
        devices: One per partition; equal ones share a worker. Any object with the attributes
            ``type`` and ``index`` works.

    Yields:
        Lists of queues, one pair per device: tasks go in, ``(True, (task, batch))`` or
        ``(False, exc_info)`` comes out.
    """
    keys = [device_key(device) for device in devices]
    queues: dict[Any, tuple[InQueue, OutQueue]] = {
        key: (SimpleQueue(), SimpleQueue()) for key in keys
    }
    threads = [threading.Thread(target=_work, args=pair, daemon=True) for pair in queues.values()]
    try:
        for thread in threads:
            thread.start()
        yield [queues[key][0] for key in keys], [queues[key][1] for key in keys]
    finally:
        for in_queue, _ in queues.values():
            in_queue.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
