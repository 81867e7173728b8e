"""Private names for ``torch.compile``."""
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import CodeType, FrameType, MethodType
from typing import Any, TypeVar

import torch
from torch.autograd.function import Function

from torchgpipe.private.lookup import find, raise_missing

__all__ = ['APPLY', 'compiled_code', 'compiled_codes', 'is_compiled', 'is_compiled_module',
           'name_of_call', 'own_context', 'uncompiled', 'untraced']

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
