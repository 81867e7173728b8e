"""Private names for saved tensors, the autograd graph, and the memory of tensors."""
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import disable_saved_tensors_hooks

from torchgpipe.private.lookup import find, raise_missing

__all__ = ['Hooks', 'PythonNode', 'at_end_of_backward', 'backward_pass', 'current_node',
           'data_address', 'innermost_hooks', 'lazy_clone', 'on_cpu_without_memory',
           'retains_graph']

#: Pack and unpack of ``torch.autograd.graph.saved_tensors_hooks``.
Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_HOOKS_NAME = 'torch._C:_autograd._top_saved_tensors_default_hooks'


def _no_hooks(ignore_is_tracing: bool) -> None:
    """Return that there are no saved-tensor hooks; or raise, as which they are can't be told."""
    message = 'there are hooks'
    try:
        with disable_saved_tensors_hooks(message):
            return
    except RuntimeError as error:
        if str(error) != message:
            raise
    raise_missing(_HOOKS_NAME, 'a pipeline within saved-tensor hooks')


#: Return this thread's saved-tensor hooks that are in force, if any. A worker has to enter the
#: hooks of its caller. The public context manager can only push its own.
innermost_hooks: Callable[[], Hooks | None] = partial(find(_HOOKS_NAME, otherwise=_no_hooks), True)


#: Return the number of the backward pass that this thread works for, -1 outside of one. What is
#: recomputed belongs to one pass; a node is not told which pass it runs in.
backward_pass: Callable[[], int] = find(
    'torch._C:_current_graph_task_id', 'backward of a checkpointed cell, or of a skip')

#: Return whether the present backward pass was called with ``retain_graph``. What a recomputation
#: needs is let go of together with the tensors that the graph saved, or else with the graph.
retains_graph: Callable[[], bool] = find(
    'torch._C:_autograd._get_current_graph_task_keep_graph', otherwise=lambda: True)

#: Return the node that runs in this thread's backward pass. An unpack hook is not told for whom it
#: unpacks. Where it can't know, a node that asks twice has its tensors computed twice.
current_node: Callable[[], Any] = find(
    'torch._C:_current_autograd_node', otherwise=lambda: None)

#: The type of the nodes of ``torch.autograd.Function``, which unpack their tensors at any time.
PythonNode: type = BackwardCFunction

#: Call a function when the present backward pass has ended; hooks of nodes come too early.
at_end_of_backward: Callable[[Callable[[], None]], None] = find(
    'torch.autograd:Variable._execution_engine.queue_callback',
    'backward of a checkpointed cell, or of a skip')


_ADDRESS_NAME = 'torch._C:_data_address'

#: Return where a tensor's memory lies. ``Tensor.data_ptr()`` counts as a write, see
#: :data:`lazy_clone`; without it there are none.
data_address: Callable[[Tensor], int] = find(_ADDRESS_NAME, otherwise=Tensor.data_ptr)

#: Copy a tensor's memory when either of both is written to, and not before. Every kernel that
#: writes is noticed by that, also one that does not count as a new version. There is no public
#: way. Recomputations copy at once where this raises.
lazy_clone: Callable[[Tensor], Tensor] = find(
    'torch:_lazy_clone' if data_address is not Tensor.data_ptr else _ADDRESS_NAME,
    'to see whether reset_parameters() sets a tensor')

_without_memory = find('torch:Tensor._make_wrapper_subclass', 'a tensor without memory')


def on_cpu_without_memory(kind: type[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a class that says it is on the CPU, and has no values.

    What is on the meta device says so, and methods that set initial values do nothing there.
    """
    return _without_memory(  # type: ignore[no-any-return]
        kind, shape, dtype=dtype, device=torch.device('cpu'))
