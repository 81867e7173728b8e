"""Private names of PyTorch that this package cannot do without, each with its reason.

Nothing else in the package uses a private name of PyTorch's. ``tests/test_private.py`` uses
each of these by itself, so that a release which takes one away is found out by name.
"""
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (tree_flatten, tree_flatten_with_path, tree_leaves, tree_map_only,
                                 tree_unflatten)

__all__ = ['APPLY', 'DISPATCH_MODES', 'FUNCTION_MODES', 'RESETS', 'BatchNorm', 'DeviceContext',
           'Hooks', 'ModeStack', 'PythonNode', 'Scaler', 'TorchDispatchMode', 'active_ddp',
           'allows_mutation', 'at_end_of_backward', 'backward_class', 'backward_pass',
           'compiled_code', 'compiled_codes', 'current_node', 'data_address', 'ignore_in_ddp',
           'ignored_in_ddp', 'innermost_hooks', 'is_compiled', 'is_full_backward_hook',
           'is_tracing', 'is_transformed', 'lazy_clone', 'name_of_call', 'on_cpu_without_memory',
           'own_context', 'parse_to', 'pop_hooks', 'proxy_mode', 'retains_graph',
           'script_attributes', 'storage_id', 'tree_flatten', 'tree_flatten_with_path',
           'tree_leaves', 'tree_map_only', 'tree_unflatten', 'uncompiled', 'unseen', 'untraced',
           'without_torch_function']

# Given on as they are: `DeviceContext` is what `torch.set_default_device` enters, and a worker has
# to tell it from a mode of the user's. `TorchDispatchMode` is the way to see all operations, and
# PyTorch's documentation names it, but not where it is to be imported from. The functions of trees
# go through values of any nesting; PyTorch has no public module for them.

#: Pack and unpack of ``torch.autograd.graph.saved_tensors_hooks``.
Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_autograd: Any = torch._C._autograd
_core: Any = torch._C

# --- saved tensors and the autograd graph
# ---------------------------------------------------------


def innermost_hooks() -> Hooks | None:
    """Give this thread's saved-tensor hooks that are in force, if any.

    A worker has to enter the hooks of its caller. The public context manager can only push its
    own.
    """
    hooks: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
    return hooks


#: Drop this thread's innermost saved-tensor hooks, which an interrupt left behind. The public way
#: is to leave the context manager, which such an interrupt has kept from being entered.
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks

#: The number of the backward pass that this thread works for, -1 outside of one. What is
#: recomputed belongs to one pass; a node is not told which pass it runs in.
backward_pass: Callable[[], int] = _core._current_graph_task_id

#: Whether the present backward pass was called with ``retain_graph``. What a recomputation needs
#: is let go of together with the tensors that the graph saved.
retains_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph

#: The node that runs in this thread's backward pass. An unpack hook is not told for whom it
#: unpacks.
current_node: Callable[[], Any] = _core._current_autograd_node

#: The type of the nodes of ``torch.autograd.Function``, which unpack their tensors at any time.
PythonNode: type = BackwardCFunction


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function when the present backward pass has ended; hooks of nodes come too early."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- memory
# ---------------------------------------------------------------------------------------


def storage_id(tensor: Tensor) -> int:
    """Tell memories apart, also where they are empty or lie on the meta device.

    ``untyped_storage().data_ptr()`` is 0 for those, and takes a copy-on-write memory for written
    to.
    """
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


#: Where a tensor's memory lies. ``Tensor.data_ptr()`` counts as a write, see :data:`lazy_clone`.
data_address: Callable[[Tensor], int] = _core._data_address

#: Copy a tensor's memory when either of both is written to, and not before. Every kernel that
#: writes is noticed by that, also one that does not count as a new version. There is no public
#: way.
lazy_clone: Callable[[Tensor], Tensor] = torch._lazy_clone


def on_cpu_without_memory(kind: type[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Give a tensor of a class that says it is on the CPU, and has no values.

    What is on the meta device says so, and methods that set initial values do nothing there.
    """
    return torch.Tensor._make_wrapper_subclass(
        kind, shape, dtype=dtype, device=torch.device('cpu'))


# --- modes and transforms
# ---------------------------------------------------------------------------


class ModeStack:
    """One of the two stacks of modes that a thread is in, bottom first.

    The public context managers push and pop one mode of their own. To carry the caller's modes to
    a worker, or back into a recomputation, a stack has to be read and written; and entering a
    ``TorchDispatchMode`` sets variables of the process, which threads that do so would spoil.
    """

    def __init__(self, kind: str, *which: None) -> None:
        self.len: Callable[[], int] = getattr(torch._C, f'_len_torch_{kind}_stack')
        self._get = getattr(torch._C, f'_get_{kind}_stack_at')
        self.push: Callable[[Any], None] = getattr(torch._C, f'_push_on_torch_{kind}_stack')
        pop = getattr(torch._C, f'_pop_torch_{kind}_stack')
        self.pop: Callable[[], Any] = partial(pop, *which)

    def read(self) -> tuple[Any, ...]:
        """Give the modes."""
        number = self.len()
        return tuple(map(self._get, range(number))) if number else ()

    def write(self, modes: tuple[Any, ...]) -> None:
        """Put other modes there."""
        # Some releases use a mode once more when it is popped, so it has to live that long.
        held = self.read()
        for _ in held:
            self.pop()
        for mode in modes:
            self.push(mode)


#: Of ``torch.overrides.TorchFunctionMode``.
FUNCTION_MODES = ModeStack('function')

#: Of ``torch.utils._python_dispatch.TorchDispatchMode``.
DISPATCH_MODES = ModeStack('dispatch', None)


_len_of_function_modes, _len_of_dispatch_modes = FUNCTION_MODES.len, DISPATCH_MODES.len


class unseen:
    """A context in which no mode sees what is done, since it is none of the user's operations."""

    __slots__ = ('_modes',)

    def __enter__(self) -> None:
        self._modes: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None
        if _len_of_dispatch_modes() or _len_of_function_modes():
            self._modes = DISPATCH_MODES.read(), FUNCTION_MODES.read()
            DISPATCH_MODES.write(())
            FUNCTION_MODES.write(())

    def __exit__(self, *args: object) -> None:
        if self._modes is not None:
            DISPATCH_MODES.write(self._modes[0])
            FUNCTION_MODES.write(self._modes[1])


def is_transformed() -> bool:
    """Tell whether a transform of ``torch.func`` is at work, unknown to other threads."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Tell whether ``torch.jit.trace`` traces; the public function has no type."""
    return torch._C._get_tracing_state() is not None


def proxy_mode() -> Any:
    """Give the mode in which ``make_fx`` or an export traces, if it does; of which likewise."""
    if not DISPATCH_MODES.len():
        return None
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes long to import
    return get_proxy_mode()


def allows_mutation() -> bool:
    """Tell whether this thread is in ``torch.autograd.graph.allow_mutation_on_saved_tensors()``.

    The flag that PyTorch keeps of it is one for all threads.
    """
    return any(isinstance(mode, _CloneArgBeforeMutateMode) for mode in DISPATCH_MODES.read())


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.compile`` leave a function alone; to import it for that would take seconds."""
    if 'torch._dynamo' not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def backward_class(function: type[Function]) -> Any:
    """Give the class of the nodes of a ``torch.autograd.Function``.

    Nothing public tells a node whether somebody has hung a hook on it.
    """
    return function._backward_cls


#: The context in which ``__torch_function__`` of subclasses is not asked, so that one can go on to
#: what it was asked about; PyTorch's documentation of subclasses names it where it is.
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass


# --- torch.compile
# ----------------------------------------------------------------------------------

TFunction = TypeVar('TFunction', bound=Callable[..., Any])

_frames: Any = torch._C._dynamo.eval_frame


def uncompiled(function: TFunction, recursive: bool = True) -> TFunction:
    """Keep ``torch.compile`` from a function, and from all that it calls if that is wanted.

    What was compiled for itself is called as it is. This is ``torch.compiler.disable``, but that
    one imports the compiler, which takes longer than to import torch, and costs at each call.
    """
    action = _frames._FrameAction
    _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(
        action.SKIP, action.SKIP if recursive else action.DEFAULT))
    function.__dict__['_torchdynamo_disable'] = True
    return function


#: The code in whose frame a pack hook is called for what a Python function saves.
APPLY = Function.apply.__func__.__code__  # type: ignore[attr-defined]


def compiled_code(frame: FrameType) -> type | None:
    """Give the compiled code that saves a tensor, by the frame in which a pack hook is called.

    PyTorch may compile a layer several times and choose by the input, so that two passes over the
    same layer save other tensors. It tells a pack hook the tensor and nothing else.

    Args:
        frame: One of :data:`APPLY`.
    """
    function: type = frame.f_locals['cls']
    return function if function.__module__ == _COMPILED else None


_COMPILED = 'torch._functorch._aot_autograd.runtime_wrappers'


def compiled_codes() -> list[type]:
    """Give all compiled codes of this process that can save tensors for backward."""
    return [function for function in Function.__subclasses__() if function.__module__ == _COMPILED]


def is_compiled(node: Any) -> bool:
    """Tell whether a node of a graph is that of compiled code."""
    function = getattr(type(node), '_forward_cls', None)
    return function is not None and function.__module__ == _COMPILED


def own_context(gradients: Any) -> None:
    """Let the node before which autograd calls this run in a context that no other one enters.

    Autograd puts the caller's context variables back before each node, so it lasts no longer.
    """
    if _core._is_key_in_tls('context'):
        _core._stash_obj_in_tls('context', _core._get_obj_in_tls('context').copy())


# --- modules
# ----------------------------------------------------------------------------------------


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """Give the device that ``module.to(…)`` is asked for, as ``nn.Module.to`` itself reads it."""
    return torch._C._nn._parse_to(*args, **kwargs)[0]


#: How a module is asked to set the initial values of its tensors. ``nn.MultiheadAttention`` and
#: ``nn.Transformer`` have no public way.
RESETS = ('reset_parameters', '_reset_parameters')

#: What all of ``nn.BatchNorm1d``, ``2d`` and ``3d`` derive from, with the code that they share.
BatchNorm = _BatchNorm


def script_attributes(module: Any) -> list[str]:
    """Name the attributes of a module of TorchScript, which are not Python's."""
    concrete = getattr(module, '_concrete_type', None)  # not of one that was loaded
    names = [] if concrete is None else concrete.get_attributes()
    return [name for name in names if name not in ('training', is_full_backward_hook)]


def name_of_call(module: Any) -> str:
    """Name the attribute of a module that its call calls: another one once it is compiled."""
    return 'forward' if module._compiled_call_impl is None else '_compiled_call_impl'


#: The attribute in which a module keeps whether its backward hooks are full ones.
is_full_backward_hook = '_is_full_backward_hook'


# --- training over several processes
# ---------------------------------------------------------------------------------------


class Scaler(torch.amp.GradScaler):
    """A scaler that lets :meth:`found` say where gradients are not finite.

    The public methods give no way to add what other processes found.
    """

    def found(self, where: dict[torch.device, Tensor], scale: Tensor
              ) -> dict[torch.device, Tensor]:
        """Give what was found on each device: 1 if some gradient is not finite, or 0."""
        return where

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor,
                        found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        where = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return self.found(where, found_inf)


def ignored_in_ddp(module: torch.nn.Module) -> list[str]:
    """Name the parameters and buffers that ``DistributedDataParallel`` is told to leave alone."""
    return list(getattr(module, '_ddp_params_and_buffers_to_ignore', ()))


#: Tell ``DistributedDataParallel``, which has no argument for it, which parameters and buffers of
#: a module it is to leave alone.
ignore_in_ddp: Callable[[torch.nn.Module, list[str]], None] = (
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model)

#: The ``DistributedDataParallel`` whose forward pass runs, if one does. What is wrapped is not
#: told.
active_ddp: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = (
    torch.nn.parallel.DistributedDataParallel._get_active_ddp_module)
