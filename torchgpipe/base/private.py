"""Private names of PyTorch that this package needs, each with its reason.

No other file of the package uses private names of PyTorch. The import of this file never fails,
because :func:`find` looks up each name. If a release does not have a name, a slower public
function replaces it, or the dependent function raises when it is used.
``tests/base/test_private.py`` tests each name alone, and also its absence.
``docs/private-names.md`` lists the place of each name in PyTorch.
"""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
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

#: The oldest and the newest release of PyTorch with which the whole test suite has passed.
TESTED = '2.11', '2.15'


def find(
    name: str,
    use: str = '',
    otherwise: Any = None,
) -> Any:
    """Return the object with a private name in PyTorch: a module, a colon, and the name in it.

    Args:
        otherwise: The replacement if the name does not exist. By default, a function that raises.

    Raises:
        ImportError: PyTorch has the name, but needs a package that is not installed.
    """
    try:
        return resolve_name(name)
    except AttributeError:
        pass
    except ImportError as error:
        missing = error.name or ''
        if missing.partition('.')[0] != 'torch':
            raise
    if otherwise is None:
        return partial(raise_missing, name, use)
    return otherwise


def raise_missing(
    name: str,
    use: str,
    *args: object,
    **kwargs: object,
) -> Any:
    """Raise the error about a private name that this release of PyTorch does not have."""
    raise NotImplementedError(
        f"{use} needs PyTorch's private {name.replace(':', '.')}, which torch {torch.__version__} "
        f'does not have; torchgpipe was tested with torch {TESTED[0]} to {TESTED[1]}. Install one '
        'of these, or a newer torchgpipe'
    )


# --- torch.compile
# ----------------------------------------------------------------------------------


TFunction = TypeVar('TFunction', bound=Callable[..., Any])

T = TypeVar('T')

_set_strategy = find('torch._C:_dynamo.eval_frame.set_code_exec_strategy', otherwise=False)
_strategy = find('torch._C:_dynamo.eval_frame._FrameExecStrategy', otherwise=False)
_action = find('torch._C:_dynamo.eval_frame._FrameAction', otherwise=False)


def uncompiled(function: TFunction, recursive: bool = True) -> TFunction:
    """Exclude a function from ``torch.compile``, and if ``recursive`` all functions that it calls.

    Functions that were compiled separately stay compiled. ``torch.compiler.disable`` has the same
    effect, but it imports the compiler, which takes longer than the import of torch. It also costs
    time at each call.
    """
    if not (_set_strategy and _strategy and _action):
        return torch.compiler.disable(  # type: ignore[no-any-return]
            function, recursive=recursive
        )
    callees = _action.SKIP if recursive else _action.DEFAULT
    _set_strategy(function.__code__, _strategy(_action.SKIP, callees))
    function.__dict__['_torchdynamo_disable'] = True
    return function


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from ``torch.compile``, without an import of it, which takes seconds."""
    if 'torch._dynamo' not in sys.modules:
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


#: The module in which compiled code is a ``torch.autograd.Function``.
_COMPILED = 'torch._functorch._aot_autograd.runtime_wrappers'

_boxed = find('torch._functorch._aot_autograd.utils:make_boxed_func', otherwise=False)


def _calls_apply() -> CodeType | None:
    if find_spec(_COMPILED) is None:
        return None
    if isinstance(Function.apply, MethodType):  # before PyTorch 2.14; later it is a builtin
        return Function.apply.__code__
    return _boxed(len).__code__ if _boxed else None


#: The code in whose frame a pack hook is called for tensors that compiled code saves. It is
#: ``Function.apply`` or, if this has no frame, its caller. ``None`` if it is not known.
APPLY = _calls_apply()


def compiled_code(frame: FrameType) -> object | None:
    """Return the compiled code that saves a tensor, by the frame in which a pack hook is called.

    The frame is one of :data:`APPLY`, or any frame if it is not known.

    PyTorch may compile a layer several times and choose by the input, so that two passes over the
    same layer save other tensors. A pack hook gets only the tensor. If the code cannot be found,
    each tensor is treated as one of other code, so that all values are compared.
    """
    if APPLY is None:
        if 'torch._dynamo' not in sys.modules:
            return None
        # A new object differs from the code of all other tensors.
        return object()

    variables = frame.f_locals
    if 'cls' in variables:
        function: object = variables['cls']
    else:
        # The frame of the caller, in which `f` is the bound method `apply`.
        function = getattr(variables['f'], '__self__', None)
    if getattr(function, '__module__', None) == _COMPILED:
        return function
    return None


def in_compiled_code() -> bool:
    """Return whether the caller is called by compiled code."""
    frame: FrameType | None = sys._getframe(1)
    while 'torch._dynamo' in sys.modules and frame is not None:
        if frame.f_globals.get('__name__') == _COMPILED:
            return True
        frame = frame.f_back
    return False


def compiled_codes() -> list[type]:
    """Return all compiled code of this process that can save tensors for backward."""
    return [function for function in Function.__subclasses__() if function.__module__ == _COMPILED]


def is_compiled(node: Any) -> bool:
    """Return whether a node of a graph belongs to compiled code."""
    function = getattr(type(node), '_forward_cls', None)
    return function is not None and function.__module__ == _COMPILED


_USE_OF_CONTEXTS = 'backward of compiled layers on several accelerators'
_has_local = find('torch._C:_is_key_in_tls', _USE_OF_CONTEXTS)
_set_local = find('torch._C:_stash_obj_in_tls', _USE_OF_CONTEXTS)
_local = find('torch._C:_get_obj_in_tls', _USE_OF_CONTEXTS)


def own_context(gradients: Any) -> None:
    """Give the next node its own copy of the context variables. Autograd calls this as a prehook.

    The copy is used for one node only, because autograd restores the caller's context variables
    before each node.
    """
    if _has_local('context'):
        _set_local('context', _local('context').copy())


def _compiled_call(module: Any) -> Any:
    """Return the compiled call of a module, if ``module.compile()`` was called."""
    if not hasattr(module, '_compiled_call_impl') and 'torch._dynamo' in sys.modules:
        raise_missing('torch.nn:Module._compiled_call_impl', 'a step beside torch.compile')
    return getattr(module, '_compiled_call_impl', None)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether a module results from ``torch.compile(module)`` or ``module.compile()``."""
    return _compiled_call(module) is not None or hasattr(module, '_orig_mod')


def name_of_call(module: Any) -> str:
    """Return the name of the attribute that a module's call runs. It differs after compilation."""
    if _compiled_call(module) is None:
        return 'forward'
    return '_compiled_call_impl'


# --- modes, and transforms of torch.func
# ----------------------------------------------------------------------------------


class ModeStack:
    """One of the two stacks of a thread's modes, bottom first.

    The public context managers only push and pop their own mode. To transfer the caller's modes to
    a worker or a recomputation, a stack has to be read and written. Entering a
    ``TorchDispatchMode`` also sets variables of the process, which concurrent threads would
    corrupt.
    """

    def __init__(
        self,
        len: str,
        get: str,
        push: str,
        pop: str,
        *which: None,
    ) -> None:
        use = 'a pipeline, which carries the modes of its caller,'
        functions = [find(name, use) for name in (get, push, pop)]
        for function in functions:
            # PyTorch does not have it, and its replacement raises. Then all of them raise, because
            # otherwise modes of the caller might be lost.
            if isinstance(function, partial):
                functions = [function] * 3
                break
        self.len: Callable[[], int] = find(len, use)
        self._get: Callable[[int], Any] = functions[0]
        self.push: Callable[[Any], None] = functions[1]
        self.pop: Callable[[], Any] = partial(functions[2], *which)

    def read(self) -> tuple[Any, ...]:
        """Return the modes."""
        number = self.len()
        if not number:
            return ()
        return tuple(map(self._get, range(number)))

    def write(self, modes: tuple[Any, ...]) -> None:
        """Replace the modes."""
        # Some releases still use a mode while it is popped, so it has to live that long.
        held = self.read()
        for _ in held:
            self.pop()
        for mode in modes:
            self.push(mode)


def generator_key(generator: torch.Generator) -> int:
    """Return an id of a generator. At each call, a mode gets a new Python object for it."""
    return getattr(generator, '_cdata', id(generator))


#: The stack of ``torch.overrides.TorchFunctionMode``.
FUNCTION_MODES = ModeStack(
    'torch._C:_len_torch_function_stack',
    'torch._C:_get_function_stack_at',
    'torch._C:_push_on_torch_function_stack',
    'torch._C:_pop_torch_function_stack',
)

#: The stack of ``torch.utils._python_dispatch.TorchDispatchMode``.
DISPATCH_MODES = ModeStack(
    'torch._C:_len_torch_dispatch_stack',
    'torch._C:_get_dispatch_stack_at',
    'torch._C:_push_on_torch_dispatch_stack',
    'torch._C:_pop_torch_dispatch_stack',
    None,
)


# Without the attribute access, because `unseen` is entered several times in a checkpointed cell.
_len_of_function_modes = FUNCTION_MODES.len
_len_of_dispatch_modes = DISPATCH_MODES.len


class unseen:
    """A context in which no mode sees operations, because they are internal to the package."""

    __slots__ = ('_dispatch_modes', '_function_modes', '_has_modes')

    def __enter__(self) -> None:
        self._has_modes = False
        if _len_of_dispatch_modes() or _len_of_function_modes():
            self._has_modes = True
            self._dispatch_modes = DISPATCH_MODES.read()
            self._function_modes = FUNCTION_MODES.read()
            DISPATCH_MODES.write(())
            FUNCTION_MODES.write(())

    def __exit__(self, *args: object) -> None:
        if self._has_modes:
            DISPATCH_MODES.write(self._dispatch_modes)
            FUNCTION_MODES.write(self._function_modes)


_MODE_NAME = 'torch.utils._python_dispatch:TorchDispatchMode'


class _NoMode:
    """The replacement of a mode class that PyTorch does not have. It has no instances."""

    def __init__(self) -> None:
        raise_missing(_MODE_NAME, 'what looks at each operation, as for random numbers,')


# `torch.set_default_device` enters `DeviceContext`, which must be distinguished from the user's
# modes: with a user's mode, cells run one after the other. `TorchDispatchMode` is the way to see
# all operations. PyTorch's documentation names it, but not its module.
if TYPE_CHECKING:
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    DeviceContext = find('torch.utils._device:DeviceContext', otherwise=_NoMode)
    TorchDispatchMode = find(_MODE_NAME, otherwise=_NoMode)


class DispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` is never compiled.

    PyTorch never compiles it for any mode, but imports the compiler for this at the first call,
    which takes two seconds in the first forward pass.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        if '__torch_dispatch__' in cls.__dict__:
            uncompiled(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class InternalMode(DispatchMode):
    """A mode of this package. Compiled layers stay compiled in it."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def run(self, function: Callable[[], T]) -> T:
        """Run a function in this mode."""
        DISPATCH_MODES.push(self)
        try:
            return function()
        finally:
            DISPATCH_MODES.pop()


class _NoTensor(Exception):
    """The replacement of a class of fake tensors that PyTorch does not have."""


#: The class of tensors without memory that behave as tensors on a device.
FakeTensor: Any = find('torch._subclasses.fake_tensor:FakeTensor', otherwise=_NoTensor)

#: Makes fake tensors.
FakeTensorMode: Any = find('torch._subclasses.fake_tensor:FakeTensorMode', 'a dry run')


#: The errors of operations whose result depends on values that fake tensors do not have.
NO_VALUES: Any = (
    find('torch._subclasses.fake_tensor:DataDependentOutputException', otherwise=_NoTensor),
    find('torch._subclasses.fake_tensor:DynamicOutputShapeException', otherwise=_NoTensor),
)

_mode_at: Any = find('torch._C:_get_dispatch_mode', otherwise=False)
_key_of_fakes: Any = find('torch._C:_TorchDispatchModeKey', otherwise=False)


def active_fake_mode() -> Any:
    """Return the mode in which fake tensors are made now, or ``None``."""
    if _mode_at and _key_of_fakes:
        return _mode_at(_key_of_fakes.FAKE)
    return None


def forget_meshes() -> None:
    """Let DTensor forget its plans of operations, which hold meshes and their groups."""
    find('torch.distributed.tensor.debug:_clear_sharding_prop_cache', 'a dry run')()


def has_backend(group: Any, device: torch.device) -> bool:
    """Return whether a process group has a backend for tensors on a device."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def timeout_of(group: Any) -> timedelta | None:
    """Return how long the collectives of a group wait for a rank; ``None`` if it is not known.

    A new group does not have the timeout of the group of all processes.
    """
    backend = group._get_backend(group._device_types[0])
    try:
        limit: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):  # The backend has no options.
        return None
    return limit


def fake_store() -> Any:
    """Return a store for process groups of the backend ``'fake'``, which do not communicate."""
    return find('torch.testing._internal.distributed.fake_pg:FakeStore', 'a dry run')()


class _Untransformed(Function):
    """A function that raises in transforms, because it does not define ``setup_context``."""

    @staticmethod
    def forward(ctx: Any) -> None:
        pass


def _transform() -> object | None:
    try:
        return _Untransformed.apply()  # type: ignore[no-any-return,no-untyped-call]
    except RuntimeError as error:
        return error


_interpreter: Callable[[], Any] = find(
    'torch._C:_functorch.peek_interpreter_stack', otherwise=_transform
)


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` is active in this thread."""
    return _interpreter() is not None


def proxy_mode() -> Any:
    """Return the mode of ``make_fx`` or an export, if it traces."""
    if not DISPATCH_MODES.len():
        return None
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes long to import

    return get_proxy_mode()


def allows_mutation() -> bool:
    """Return whether this thread is in ``torch.autograd.graph.allow_mutation_on_saved_tensors()``.

    PyTorch's own flag for it is common to all threads.
    """
    return any(type(mode).__module__ == 'torch.autograd.graph' for mode in DISPATCH_MODES.read())


def schema_of(operation: Any) -> Any:
    """Return the schema of an operation; ``None`` for a higher-order operation."""
    schema = getattr(operation, '_schema', None)
    if schema is None and hasattr(operation, 'overloadpacket'):
        raise_missing('torch._ops:OpOverload._schema', 'what looks at each operation')
    return schema


#: The class of operations that take functions, such as ``flex_attention``.
HigherOrderOperator: Any = find('torch._ops:HigherOrderOperator', otherwise=_NoTensor)

_without_key: Any = find('torch._C:_SetExcludeDispatchKeyGuard', otherwise=False)
_key_of_views: Any = find('torch._C:DispatchKey.ADInplaceOrView', otherwise=False)


def alias_of(x: Tensor) -> Tensor:
    """Return an alias of a result within a dispatch mode, which shows later changes of it.

    The alias does not have the graph that autograd will give to the result. In a mode, a detached
    tensor has the version of its source only with this private switch. Without it, a copy is made.
    """
    if not (_without_key and _key_of_views):
        return x.clone()
    with _without_key(_key_of_views, False):
        return x.detach()


_custom_operations: Any = find('torch._library.custom_ops:OPDEFS', otherwise={})
_composite: Any = find(
    'torch._C:DispatchKey.CompositeImplicitAutograd', 'what looks at each operation'
)


def body_of(operation: Any) -> Callable[..., Any] | None:
    """Return the function by which an operation calls other operations.

    A mode sees the others by itself, unless it is active within an operation of
    :func:`torch.library.custom_op`, or where autograd is not.

    Returns:
        ``None`` for an operation that does not call others.
    """
    name = str(schema_of(operation).name)
    if name in _custom_operations:
        return getattr(_custom_operations[name], '_init_fn', None)
    if name.startswith('aten::') and operation.has_kernel_for_dispatch_key(_composite):
        body: Callable[..., Any] = operation.decompose
        return body
    return None


# --- saved tensors, the autograd graph, and the memory of tensors
# ----------------------------------------------------------------------------------


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the number of changes in place of each tensor, including changes through views.

    Changes in inference mode are not counted.
    """
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        # A tensor of inference mode does not have a version.
        numbers = [0] * len(tensors)
        for k, x in enumerate(tensors):
            if not x.is_inference():
                numbers[k] = x._version
        return numbers


#: Pack and unpack of ``torch.autograd.graph.saved_tensors_hooks``.
Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_HOOKS_NAME = 'torch._C:_autograd._top_saved_tensors_default_hooks'


def _no_hooks(ignore_is_tracing: bool) -> None:
    """Return ``None`` if there are no saved-tensor hooks, or raise, because they are not known."""
    message = 'there are hooks'
    try:
        with disable_saved_tensors_hooks(message):
            return
    except RuntimeError as error:
        if str(error) != message:
            raise
    raise_missing(_HOOKS_NAME, 'a pipeline within saved-tensor hooks')


#: Return this thread's active saved-tensor hooks, if any. A worker has to enter the hooks of its
#: caller. The public context manager can only push its own hooks.
innermost_hooks: Callable[[], Hooks | None] = partial(
    find(_HOOKS_NAME, otherwise=_no_hooks),
    True,  # ignore_is_tracing
)


#: Return the number of this thread's backward pass, -1 outside of one. Recomputed tensors belong
#: to one pass, and a node does not get its pass.
backward_pass: Callable[[], int] = find(
    'torch._C:_current_graph_task_id', 'backward of a checkpointed cell, or of a skip'
)

#: Return whether the present backward pass was called with ``retain_graph``. The data for a
#: recomputation is released together with the graph's saved tensors, or otherwise with the graph.
retains_graph: Callable[[], bool] = find(
    'torch._C:_autograd._get_current_graph_task_keep_graph', otherwise=lambda: True
)

#: Return the node that runs in this thread's backward pass. An unpack hook does not get its node.
#: If the node is not known, tensors that a node unpacks twice are computed twice.
current_node: Callable[[], Any] = find(
    'torch._C:_current_autograd_node',
    otherwise=lambda: None,
)

#: The type of the nodes of ``torch.autograd.Function``, which unpack their tensors at any time.
PythonNode: type = BackwardCFunction

#: Call a function at the end of the present backward pass; hooks of nodes run too early.
at_end_of_backward: Callable[[Callable[[], None]], None] = find(
    'torch.autograd:Variable._execution_engine.queue_callback',
    'backward of a checkpointed cell, or of a skip',
)

#: Whether a profiler records. Its labels take as long as the smallest operations.
is_profiled: Callable[[], bool] = find(
    'torch.autograd:_profiler_enabled',
    otherwise=lambda: True,
)

_run_engine: Any = find('torch.autograd.graph:_engine_run_backward', otherwise=False)

#: Run backward from edges, with gradients of the right shapes; both are tuples. The public
#: function checks them first, which takes as long as a small layer.
backward_from: Callable[[tuple[GradientEdge, ...], tuple[Tensor, ...]], object]
backward_from = torch.autograd.backward
if _run_engine:
    backward_from = partial(
        _run_engine,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )

_without_memory = find('torch:Tensor._make_wrapper_subclass', 'a tensor without memory')


def on_cpu_without_memory(
    kind: type[Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """Return a tensor of a class with the CPU as its device and without values.

    A tensor on the meta device would not do, because methods that set initial values skip it.
    """
    return _without_memory(  # type: ignore[no-any-return]
        kind,
        shape,
        dtype=dtype,
        device=torch.device('cpu'),
    )


# --- modules and nested values
# ----------------------------------------------------------------------------------


# PyTorch has no public module for pytrees, and only these functions know the registered classes.

_USE_OF_TREES = 'a value that is no tensor, or a context variable,'
tree_flatten: Any = find('torch.utils._pytree:tree_flatten', _USE_OF_TREES)
tree_flatten_with_path: Any = find('torch.utils._pytree:tree_flatten_with_path', _USE_OF_TREES)
tree_leaves: Any = find('torch.utils._pytree:tree_leaves', _USE_OF_TREES)
tree_map_only: Any = find('torch.utils._pytree:tree_map_only', _USE_OF_TREES)
tree_unflatten: Any = find('torch.utils._pytree:tree_unflatten', _USE_OF_TREES)


#: The methods by which a module sets the initial values of its tensors.
#: ``nn.MultiheadAttention`` and ``nn.Transformer`` do not have a public method.
RESETS = ('reset_parameters', '_reset_parameters')

# The common base class of `nn.BatchNorm1d`, `2d` and `3d`.
if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm

    BatchNorm = _BatchNorm
else:
    BatchNorm = torch.nn.BatchNorm1d.__base__


#: The attributes of a module's forward hooks and backward hooks.
HOOKS = (
    '_forward_hooks',
    '_forward_hooks_with_kwargs',
    '_forward_hooks_always_called',
    '_forward_pre_hooks',
    '_forward_pre_hooks_with_kwargs',
    '_backward_hooks',
    '_backward_pre_hooks',
)


#: Return the collections of a module's hooks. A module has hooks if any is not empty.
hooks_of: Callable[[torch.nn.Module], tuple[Any, ...]] = attrgetter(*HOOKS)


def remove_hooks(x: Tensor, first: int) -> None:
    """Remove the hooks that were registered on a tensor since a handle would have had this id."""
    hooks: Any
    for hooks in (x._backward_hooks, x._post_accumulate_grad_hooks):
        for number in list(hooks or ()):
            # Handles have ascending ids.
            if number >= first:
                del hooks[number]


#: The attribute of a module that is true if its backward hooks are full backward hooks.
is_full_backward_hook = '_is_full_backward_hook'


# --- training over several processes
# ----------------------------------------------------------------------------------


_UNSCALE_NAME = 'torch.amp:GradScaler._unscale_grads_'


class Scaler(torch.amp.GradScaler):
    """A scaler of the gradients of several processes.

    The public methods can neither add the results of other processes, by :meth:`found`, nor take
    the local parts of gradients, by :meth:`parts`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if find(_UNSCALE_NAME, otherwise=self) is self:
            raise_missing(_UNSCALE_NAME, 'a GradScaler for shards')
        super().__init__(*args, **kwargs)

    def found(
        self, where: dict[torch.device, Tensor], scale: Tensor
    ) -> dict[torch.device, Tensor]:
        """Return by device 1 if some gradient is not finite, or 0."""
        return where

    def parts(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return an object with the groups of an optimizer, whose gradients are plain tensors."""
        return optimizer

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        where = super()._unscale_grads_(
            self.parts(optimizer),
            inv_scale,
            found_inf,
            allow_fp16,
        )
        return self.found(where, found_inf)


_set_ignored = find(
    'torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model',
    'shards beside DistributedDataParallel',
)


#: The attribute of a module with the names that ``DistributedDataParallel`` ignores.
_IGNORED = '_ddp_params_and_buffers_to_ignore'


def ignore_in_ddp(
    module: torch.nn.Module,
    names: list[str],
) -> None:
    """Add parameters and buffers of a module that ``DistributedDataParallel`` ignores.

    ``DistributedDataParallel`` does not have an argument for it.
    """
    # PyTorch's method replaces the names that are in the attribute already.
    _set_ignored(module, [*getattr(module, _IGNORED, ()), *names])
    # PyTorch may have renamed the attribute that its method sets.
    if not set(names).issubset(getattr(module, _IGNORED, ())):
        raise_missing(
            'torch.nn:Module._ddp_params_and_buffers_to_ignore',
            'shards beside DistributedDataParallel',
        )


#: Return the ``DistributedDataParallel`` whose forward pass runs, if one does. The wrapped module
#: does not know it.
active_ddp: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = find(
    'torch.nn.parallel:DistributedDataParallel._get_active_ddp_module',
    'sharded layers, which DistributedDataParallel would overwrite,',
)
