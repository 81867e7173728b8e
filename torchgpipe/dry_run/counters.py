"""The counter of a rank: memory, FLOPs, collectives and messages of each item in its row.

:class:`Counter` sees each operation below autograd and below DTensor, on fake tensors. It sums up
the memory that operations allocate, until it is freed. :meth:`Counter.at` ends the account of one
item and starts the next one::

    begin       0F0         0F0>1       …       1B0>0       0B0         None
    ├── Entry ──┼── Entry ──┼── Entry ──┤       ├── Entry ──┼── Entry ──┼── Entry ──┤
    input       bytes, peak, FLOPs, collectives, messages                 reduction, end
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from torchgpipe.base.context import context
from torchgpipe.base.private import (
    DISPATCH_MODES,
    NO_VALUES,
    DispatchMode,
    FakeTensor,
    active_fake_mode,
    body_of,
    schema_of,
    tree_leaves,
)
from torchgpipe.base.structure import is_plain, size_of
from torchgpipe.schedule.messages import Item

no_context: AbstractContextManager[Any] = nullcontext()

#: Operations whose FLOPs are the FLOPs of another one.
_LIKE = {
    'addmm_': 'addmm',
    '_scaled_dot_product_flash_attention_for_cpu': '_scaled_dot_product_flash_attention',
    '_scaled_dot_product_flash_attention_for_cpu_backward': (
        '_scaled_dot_product_flash_attention_backward'
    ),
}


class Collective(NamedTuple):
    """A collective of a rank.

    Args:
        bytes: The size of its input or its output, whichever is larger.
    """

    name: str
    group: str
    bytes: int


class Entry(NamedTuple):
    """The account of one item in the row of a rank.

    Args:
        item: The action or message; ``None`` before the first one, and after the last one.
        bytes: The change of the memory in use.
        peak: The largest memory in use, above the memory in use before.
        sent: The bytes of each send, by rank.
    """

    item: Item | None
    bytes: int
    peak: int
    #: The change of the memory of messages in flight.
    messages: int
    #: The change of the memory of gathered parameters.
    gathered: int
    flops: int
    collectives: tuple[Collective, ...]
    sent: tuple[tuple[int, int], ...]


class Counter(DispatchMode):
    """Counts operations while it is active.

    Args:
        fakes: The mode in which tensors are made, if they are fake. It is active only then,
            because DTensor does not cache its plans in such a mode.

    Attributes:
        sent: The bytes of each send of the current item, by rank.
    """

    def __init__(self, fakes: Any = no_context) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        #: The memories that were there before, and do not count.
        self.others: Container[int] = ()
        self.gathered: Callable[[], int] = int
        self.entries: list[Entry] = []
        self.sent: list[tuple[int, int]] = []
        self.messages = 0
        self._bytes = self._peak = self._flops = 0
        self._collectives: list[Collective] = []
        self._sizes: dict[int, int] = {}
        self._item: Item | None = None
        self._before = 0, 0, 0

    def at(self, item: Item | None) -> None:
        """End the account of the current item, and start the account of another one."""
        bytes, messages, gathered = self._before
        now = self.gathered()
        self.entries.append(
            Entry(
                self._item,
                self._bytes - bytes,
                self._peak - bytes,
                self.messages - messages,
                now - gathered,
                self._flops,
                (*self._collectives,),
                (*self.sent,),
            )
        )
        self._item = item
        self._peak = self._bytes
        self._flops = 0
        self._collectives = []
        self.sent = []
        self._before = self._bytes, self.messages, now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # The operations on its local tensor come next.
        kwargs = kwargs or {}
        space, operation, makes, flops, body = _known(func)
        if operation == '_local_scalar_dense' and isinstance(args[0], FakeTensor):
            return _read()
        active = active_fake_mode()
        if active is not None and active is not self._fakes:
            return func(*args, **kwargs)  # DTensor looks for the shape of a result.
        if body is not None:
            # PyTorch would use shapes alone, without memory and FLOPs within the operation.
            with self:
                return body(*args, **kwargs)
        try:
            with self._fakes if makes else no_context:
                result = func(*args, **kwargs)
        except NO_VALUES as error:
            raise _no_values(operation) from error
        if flops is not None:
            self._flops += flops(*args, **kwargs, out_val=result)
        if space in ('c10d', '_c10d_functional', '_dtensor'):
            group = _group_of(args)
            if group is not None:
                self._collectives.append(
                    Collective(operation, group, max(_bytes_in(each) for each in (*args, result)))
                )
        for x in [result] if isinstance(result, Tensor) else tree_leaves(result):
            # Tensors that wrap others have no memory, nor do tensors on the meta device.
            if is_plain(x) and not x.is_meta:
                self._see(x)
        return result

    def _see(self, x: Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        memory = x.untyped_storage()
        if id(memory) in self.others:
            return
        if id(memory) not in self._sizes:
            self._sizes[id(memory)] = 0
            finalize(memory, self._free, id(memory))
        self.resize(memory)

    def resize(self, memory: torch.UntypedStorage) -> None:
        """Count the present size of a memory, if its tensor was seen."""
        size = memory.nbytes()
        before = self._sizes.get(id(memory))
        if before is None:
            return
        self._bytes += size - before
        self._sizes[id(memory)] = size
        self._peak = max(self._peak, self._bytes)

    def _free(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)


@cache
def _known(func: Any) -> tuple[str, str, bool, Any, Any]:
    """Return namespace, name, whether an operation makes tensors from none, FLOPs, and body."""
    schema = schema_of(func)
    space, _, operation = str(schema.name).partition('::')
    makes = not any('Tensor' in str(each.type) for each in schema.arguments)
    name = _LIKE.get(operation, operation)
    return (
        space,
        operation,
        makes,
        (flop_registry.get(getattr(torch.ops.aten, name)) if space == 'aten' else None),
        body_of(func),
    )


@contextmanager
def calls_seen() -> Iterator[None]:
    """Let counters see calls that are no operations, so that no mode sees them.

    These change the size of a memory, by which FSDP frees parameters, or read values by NumPy.
    """
    resize = torch.UntypedStorage.resize_
    numpy = Tensor.numpy

    def seen(memory: Any, size: int) -> Any:
        result = resize(memory, size)
        for mode in DISPATCH_MODES.read():
            if isinstance(mode, Counter):
                mode.resize(memory)
        return result

    def read(x: Tensor, **options: Any) -> Any:
        if isinstance(x, FakeTensor):
            raise _no_values('numpy')
        return numpy(x, **options)

    torch.UntypedStorage.resize_ = seen  # type: ignore[assignment, method-assign]
    Tensor.numpy = read  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Tensor.numpy = numpy  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _read() -> Any:
    """Return the value of a fake tensor: 1, as if all ranks have a loss and gradients.

    Raises:
        RuntimeError: A layer or the loss reads it.
    """
    if context.micro_batch is not None:
        raise _no_values('item')
    return 1


def _no_values(operation: str) -> RuntimeError:
    return RuntimeError(
        f'a layer or loss_fn reads values of a tensor ({operation}), such as by '
        '.item() or an if, but a dry run has no values. Compute with tensors '
        'whose shapes depend on shapes only, such as by torch.where'
    )


def _bytes_in(value: Any) -> int:
    return sum(size_of(x) for x in tree_leaves(value) if isinstance(x, Tensor))


def _group_of(args: Sequence[Any]) -> str | None:
    """Return the name of the process group in the arguments of an operation."""
    names = [each for each in args if isinstance(each, str)]  # The last one, after a reduction.
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                names.append(ProcessGroup.unbox(each).group_name)
            except RuntimeError:  # It is a kind of reduction.
                continue
    return names[-1] if names else None
