"""Private names for modes, and for transforms of ``torch.func``."""
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd.function import Function

from torchgpipe.private.compiled import uncompiled
from torchgpipe.private.lookup import find, raise_missing

__all__ = ['DISPATCH_MODES', 'FUNCTION_MODES', 'DeviceContext', 'DispatchMode', 'ModeStack',
           'allows_mutation', 'is_transformed', 'proxy_mode', 'schema_of', 'unseen']


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
