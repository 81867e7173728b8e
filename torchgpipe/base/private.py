"""Private names of PyTorch that this package needs, each with its reason.

Nothing else in the package uses a private name of PyTorch's, and importing this never fails: each
name is looked up by :func:`torchgpipe.base.private.find`. Where a release does not have it,
something public takes its place, slower; or what needs it raises when it is used, and says so.
``tests/base/test_private.py`` uses each of these by itself, and takes away one after the other;
``docs/private-names.md`` says where each lives in PyTorch.
"""
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pkgutil import resolve_name
from types import CodeType, FrameType, MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.autograd.graph import GradientEdge, disable_saved_tensors_hooks

__all__ = ['APPLY', 'BatchNorm', 'DISPATCH_MODES', 'DeviceContext', 'DispatchMode',
           'FUNCTION_MODES', 'HOOKS', 'Hooks', 'ModeStack', 'PythonNode', 'RESETS', 'Scaler',
           'TESTED', 'active_ddp', 'allows_mutation', 'at_end_of_backward', 'backward_from',
           'backward_pass', 'compiled_code', 'compiled_codes', 'current_node', 'find',
           'generator_key', 'hooks_of', 'ignore_in_ddp', 'innermost_hooks', 'is_compiled',
           'is_compiled_module', 'is_full_backward_hook', 'is_transformed', 'name_of_call',
           'on_cpu_without_memory', 'own_context', 'proxy_mode', 'raise_missing', 'retains_graph',
           'schema_of', 'tree_flatten', 'tree_flatten_with_path', 'tree_leaves', 'tree_map_only',
           'tree_unflatten', 'uncompiled', 'unseen', 'untraced', 'versions']

#: The releases of PyTorch that the whole suite has passed on, oldest and newest.
TESTED = '2.11', '2.15'


def find(name: str, use: str = '', otherwise: Any = None) -> Any:
    """Return what PyTorch has under a private name.

    Args:
        name: The module, a colon, and the name in it.
        use: What needs it, for the error that is raised when that is used and PyTorch has no such
            name.
        otherwise: What takes its place then, if anything does.
    """
    try:
        return resolve_name(name)
    except (AttributeError, ImportError):
        return partial(raise_missing, name, use) if otherwise is None else otherwise


def raise_missing(name: str, use: str, *args: object, **kwargs: object) -> Any:
    raise NotImplementedError(
        f"{use} needs PyTorch's private {name.replace(':', '.')}, which torch {torch.__version__} "
        f'does not have; torchgpipe was tested with torch {TESTED[0]} to {TESTED[1]}. Install one '
        'of these, or a newer torchgpipe')


# --- torch.compile
# ----------------------------------------------------------------------------------


TFunction = TypeVar('TFunction', bound=Callable[..., Any])

_set_strategy = find('torch._C:_dynamo.eval_frame.set_code_exec_strategy', otherwise=False)
_strategy = find('torch._C:_dynamo.eval_frame._FrameExecStrategy', otherwise=False)
_action = find('torch._C:_dynamo.eval_frame._FrameAction', otherwise=False)


def uncompiled(function: TFunction, recursive: bool = True) -> TFunction:
    """Keep ``torch.compile`` from a function, and from all that it calls if that is wanted.

    What was compiled for itself is called as it is. This is ``torch.compiler.disable``, but that
    one imports the compiler, which takes longer than to import torch, and costs at each call.
    """
    if not (_set_strategy and _strategy and _action):
        return torch.compiler.disable(  # type: ignore[no-any-return]
            function, recursive=recursive)
    _set_strategy(function.__code__, _strategy(
        _action.SKIP, _action.SKIP if recursive else _action.DEFAULT))
    function.__dict__['_torchdynamo_disable'] = True
    return function


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.compile`` leave a function alone; to import it for that would take seconds."""
    if 'torch._dynamo' not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


#: The module in which compiled code is a ``torch.autograd.Function``.
_COMPILED = 'torch._functorch._aot_autograd.runtime_wrappers'

_boxed = find('torch._functorch._aot_autograd.utils:make_boxed_func', otherwise=False)


def _calls_apply() -> CodeType | None:
    if find_spec(_COMPILED) is None:
        return None
    if isinstance(Function.apply, MethodType):  # before PyTorch 2.14, from where it is built in
        return Function.apply.__code__
    return _boxed(len).__code__ if _boxed else None


#: The code in whose frame a pack hook is called for what compiled code saves: ``Function.apply``
#: or, where that has no frame, what calls it. ``None`` if it is not known.
APPLY = _calls_apply()


def compiled_code(frame: FrameType) -> object | None:
    """Return the compiled code that saves a tensor, by the frame in which a pack hook is called.

    PyTorch may compile a layer several times and choose by the input, so that two passes over the
    same layer save other tensors. It tells a pack hook the tensor and nothing else. Where it can't
    be found out, each tensor is taken for one of other code, so that all values are compared.

    Args:
        frame: One of :data:`APPLY`, or any if that is not known.
    """
    if APPLY is None:
        return object() if 'torch._dynamo' in sys.modules else None
    local = frame.f_locals
    function = local['cls'] if 'cls' in local else getattr(local['f'], '__self__', None)
    return function if getattr(function, '__module__', None) == _COMPILED else None


def compiled_codes() -> list[type]:
    """Return all compiled codes of this process that can save tensors for backward."""
    return [function for function in Function.__subclasses__() if function.__module__ == _COMPILED]


def is_compiled(node: Any) -> bool:
    """Return whether a node of a graph is that of compiled code."""
    function = getattr(type(node), '_forward_cls', None)
    return function is not None and function.__module__ == _COMPILED


_USE_OF_CONTEXTS = 'backward of compiled layers on several accelerators'
_has_local = find('torch._C:_is_key_in_tls', _USE_OF_CONTEXTS)
_set_local = find('torch._C:_stash_obj_in_tls', _USE_OF_CONTEXTS)
_local = find('torch._C:_get_obj_in_tls', _USE_OF_CONTEXTS)


def own_context(gradients: Any) -> None:
    """Let the node before which autograd calls this run in a context that no other one enters.

    Autograd puts the caller's context variables back before each node, so it lasts no longer.
    """
    if _has_local('context'):
        _set_local('context', _local('context').copy())


def _compiled_call(module: Any) -> Any:
    """Return what ``module.compile()`` has made to be called, if it was."""
    if not hasattr(module, '_compiled_call_impl') and 'torch._dynamo' in sys.modules:
        raise_missing('torch.nn:Module._compiled_call_impl', 'a step beside torch.compile')
    return getattr(module, '_compiled_call_impl', None)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` gave a module, or ``module.compile()`` changed it.
    """
    return _compiled_call(module) is not None or hasattr(module, '_orig_mod')


def name_of_call(module: Any) -> str:
    """Return the attribute of a module that its call calls: another one once it is compiled."""
    return 'forward' if _compiled_call(module) is None else '_compiled_call_impl'


# --- modes, and transforms of torch.func
# ----------------------------------------------------------------------------------


class ModeStack:
    """One of the two stacks of modes that a thread is in, bottom first.

    The public context managers push and pop one mode of their own. To carry the caller's modes to
    a worker, or back into a recomputation, a stack has to be read and written; and entering a
    ``TorchDispatchMode`` sets variables of the process, which threads that do so would spoil.
    """

    def __init__(self, len: str, get: str, push: str, pop: str, *which: None) -> None:
        use = 'a pipeline, which carries the modes of its caller,'
        found = [find(name, use) for name in (get, push, pop)]
        # Not one without the others, or modes of the caller might be lost.
        missing = [each for each in found if isinstance(each, partial)]
        self.len: Callable[[], int] = find(len, use)
        self._get: Callable[[int], Any] = missing[0] if missing else found[0]
        self.push: Callable[[Any], None] = missing[0] if missing else found[1]
        self.pop: Callable[[], Any] = partial(missing[0] if missing else found[2], *which)

    def read(self) -> tuple[Any, ...]:
        """Return the modes."""
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


def generator_key(generator: torch.Generator) -> int:
    """Tell generators apart: a mode is given a new Python object for one at each call."""
    return getattr(generator, '_cdata', id(generator))


#: Of ``torch.overrides.TorchFunctionMode``.
FUNCTION_MODES = ModeStack(
    'torch._C:_len_torch_function_stack', 'torch._C:_get_function_stack_at',
    'torch._C:_push_on_torch_function_stack', 'torch._C:_pop_torch_function_stack')

#: Of ``torch.utils._python_dispatch.TorchDispatchMode``.
DISPATCH_MODES = ModeStack(
    'torch._C:_len_torch_dispatch_stack', 'torch._C:_get_dispatch_stack_at',
    'torch._C:_push_on_torch_dispatch_stack', 'torch._C:_pop_torch_dispatch_stack', None)


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


_MODE_NAME = 'torch.utils._python_dispatch:TorchDispatchMode'


class _NoMode:
    """What stands in for a class of modes that PyTorch does not have; there is none of it."""

    def __init__(self) -> None:
        raise_missing(_MODE_NAME, 'what looks at each operation, as for random numbers,')


# `DeviceContext` is what `torch.set_default_device` enters, and a worker has to tell it from a
# mode of the user's: beside one of those, cells run one after the other. `TorchDispatchMode` is
# the way to see all operations; PyTorch's documentation names it, but not where it is.
if TYPE_CHECKING:
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    DeviceContext = find('torch.utils._device:DeviceContext', otherwise=_NoMode)
    TorchDispatchMode = find(_MODE_NAME, otherwise=_NoMode)


class DispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` is never compiled.

    That holds for each mode, but PyTorch imports the compiler for it at the first call: two
    seconds in the first forward pass.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if '__torch_dispatch__' in cls.__dict__:
            uncompiled(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Untransformed(Function):
    """A function that transforms refuse, since they are not told what it keeps."""

    @staticmethod
    def forward(ctx: Any) -> None:
        pass


def _transform() -> object | None:
    try:
        return _Untransformed.apply()  # type: ignore[no-any-return,no-untyped-call]
    except RuntimeError as error:
        return error


_interpreter: Callable[[], Any] = find(
    'torch._C:_functorch.peek_interpreter_stack', otherwise=_transform)


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` is at work, unknown to other threads."""
    return _interpreter() is not None


def proxy_mode() -> Any:
    """Return the mode in which ``make_fx`` or an export traces, if it does."""
    if not DISPATCH_MODES.len():
        return None
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes long to import
    return get_proxy_mode()


def allows_mutation() -> bool:
    """Return whether this thread is in ``torch.autograd.graph.allow_mutation_on_saved_tensors()``.

    The flag that PyTorch keeps of it is one for all threads.
    """
    return any(type(mode).__module__ == 'torch.autograd.graph' for mode in DISPATCH_MODES.read())


def schema_of(operation: Any) -> Any:
    """Return what an operation says of its arguments, ``None`` for one of higher order."""
    schema = getattr(operation, '_schema', None)
    if schema is None and hasattr(operation, 'overloadpacket'):
        raise_missing('torch._ops:OpOverload._schema', 'what looks at each operation')
    return schema


# --- saved tensors, the autograd graph, and the memory of tensors
# ----------------------------------------------------------------------------------

def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of changes in place of each tensor, including changes through views.

    Changes in inference mode are not counted.
    """
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in tensors]


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

_run_engine: Any = find('torch.autograd.graph:_engine_run_backward', otherwise=False)

#: Go back from edges, with gradients of the right shapes; both are tuples. The public function
#: checks them first, which takes as long as a small layer.
backward_from: Callable[[tuple[GradientEdge, ...], tuple[Tensor, ...]], object] = partial(
    _run_engine, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True,
    accumulate_grad=True) if _run_engine else torch.autograd.backward

_without_memory = find('torch:Tensor._make_wrapper_subclass', 'a tensor without memory')


def on_cpu_without_memory(kind: type[Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a class that says it is on the CPU, and has no values.

    What is on the meta device says so, and methods that set initial values do nothing there.
    """
    return _without_memory(  # type: ignore[no-any-return]
        kind, shape, dtype=dtype, device=torch.device('cpu'))


# --- modules and nested values
# ----------------------------------------------------------------------------------


# PyTorch has no public module for them, and no other functions know the classes that are
# registered with these.

_USE_OF_TREES = 'a value that is no tensor, or a context variable,'
tree_flatten: Any = find('torch.utils._pytree:tree_flatten', _USE_OF_TREES)
tree_flatten_with_path: Any = find('torch.utils._pytree:tree_flatten_with_path', _USE_OF_TREES)
tree_leaves: Any = find('torch.utils._pytree:tree_leaves', _USE_OF_TREES)
tree_map_only: Any = find('torch.utils._pytree:tree_map_only', _USE_OF_TREES)
tree_unflatten: Any = find('torch.utils._pytree:tree_unflatten', _USE_OF_TREES)


#: How a module is asked to set the initial values of its tensors. ``nn.MultiheadAttention`` and
#: ``nn.Transformer`` have no public way.
RESETS = ('reset_parameters', '_reset_parameters')

# What all of `nn.BatchNorm1d`, `2d` and `3d` derive from, with the code that they share.
if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
else:
    BatchNorm = torch.nn.BatchNorm1d.__base__


#: Where a module has its forward hooks, and those that its call makes nodes in the graph of.
HOOKS = ('_forward_hooks', '_forward_hooks_with_kwargs', '_forward_hooks_always_called',
         '_forward_pre_hooks', '_forward_pre_hooks_with_kwargs', '_backward_hooks',
         '_backward_pre_hooks')


#: Return the hooks that a call of a module calls: if any is not empty, it has some.
hooks_of: Callable[[torch.nn.Module], tuple[Any, ...]] = attrgetter(*HOOKS)


#: The attribute in which a module keeps whether its backward hooks are full ones.
is_full_backward_hook = '_is_full_backward_hook'


# --- training over several processes
# ----------------------------------------------------------------------------------


_UNSCALE_NAME = 'torch.amp:GradScaler._unscale_grads_'


class Scaler(torch.amp.GradScaler):
    """A scaler that lets :meth:`found` say where gradients are not finite.

    The public methods give no way to add what other processes found.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if find(_UNSCALE_NAME, otherwise=self) is self:
            raise_missing(_UNSCALE_NAME, 'a GradScaler for shards')
        super().__init__(*args, **kwargs)

    def found(self, where: dict[torch.device, Tensor], scale: Tensor
              ) -> dict[torch.device, Tensor]:
        """Return what was found on each device: 1 if some gradient is not finite, or 0."""
        return where

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor,
                        found_inf: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        where = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return self.found(where, found_inf)


_set_ignored = find(
    'torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model',
    'shards beside DistributedDataParallel')


def _ignored_in_ddp(module: torch.nn.Module) -> list[str]:
    return list(getattr(module, '_ddp_params_and_buffers_to_ignore', ()))


def ignore_in_ddp(module: torch.nn.Module, names: list[str]) -> None:
    """Tell ``DistributedDataParallel`` to leave more parameters and buffers of a module alone.

    It has no argument for it.
    """
    _set_ignored(module, [*_ignored_in_ddp(module), *names])
    if not {*names} <= {*_ignored_in_ddp(module)}:
        raise_missing('torch.nn:Module._ddp_params_and_buffers_to_ignore',
                      'shards beside DistributedDataParallel')


#: Return the ``DistributedDataParallel`` whose forward pass runs, if one does. What is wrapped is
#: not told.
active_ddp: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = find(
    'torch.nn.parallel:DistributedDataParallel._get_active_ddp_module',
    'sharded layers, which DistributedDataParallel would overwrite,')
