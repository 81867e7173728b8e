"""Recomputed tensors: tensors that one recomputation saves for the nodes of one backward pass.

[Note: Lifetime of a recomputed tensor]
    run ──keep──▶ RecomputedTensors.tensors[k] ──take──▶ the node that saved it ──▶ freed
Each backward pass has a fill of its own, since several threads may go through a graph that is
retained. A node of PyTorch's own unpacks a tensor exactly once. A `torch.autograd.Function`
unpacks all its tensors whenever its author says `ctx.saved_tensors`, so these stay until another
node's turn. What no node asked for is dropped at the end of the pass.

[Note: Saved by compiled code]
``torch.compile`` keeps several codes for a layer and chooses by the input, the newest ones first.
So where a recomputation runs, there may be a code that was not there in the first pass, as for
another size of micro-batches. What a code saves, and in which order, is up to the compiler; and it
is the code of the first pass whose backward will take it. Only the values tell.
"""
import weakref
from collections.abc import Callable
from sys import _getframe
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.engine.checkpoint.samples import agree, elements_of
from torchgpipe.errors import nested, other_path
from torchgpipe.private import APPLY, Hooks, PythonNode, compiled_code, current_node, uncompiled

__all__ = ['RecomputedTensors', 'Saved']


class Saved(NamedTuple):
    """What compiled code has saved in a first pass: which code, and some elements."""

    code: object
    elements: Tensor | None

    @staticmethod
    def of(code: object, tensor: Tensor) -> 'Saved':
        """Take note of a tensor."""
        elements = elements_of(tensor, every=True)
        # On its device, since it will hardly ever be looked at.
        return Saved(code, None if elements is None else elements.clone())


class RecomputedTensors:
    """The tensors of one recomputation, for the nodes of one backward pass.

    Args:
        saved: Fingerprints of what the first pass saved.
        compiled: Those of compiled code.
        hooks: The user's saved-tensor hooks, if any.
    """

    __slots__ = ('_compiled', '_held', '_holder', '_hooks', '_next', '_saved', '_tensors')

    def __init__(self, saved: list[int], compiled: dict[int, Saved], hooks: Hooks | None) -> None:
        self._saved = saved
        self._compiled = compiled
        self._hooks = hooks
        self._next = 0
        self._tensors: dict[int, tuple[Any, int | None]] = {}
        self._holder: Callable[[], Any] = _gone
        self._held: dict[int, Tensor] = {}

    @uncompiled
    def keep(self, tensor: Tensor) -> int:
        """Pack hook of the recomputation: keep the tensor under its number."""
        k = self._next
        self._next += 1
        if k < len(self._saved) and self._saved[k] != hash((tensor.shape, tensor.dtype)):
            if tensor.is_nested:
                raise nested()
            raise other_path(f'saved tensor {k} is now {tensor.dtype} of shape '
                             f'{tuple(tensor.shape)}, which it was not')
        frame = _getframe(1)
        code = compiled_code(frame) if APPLY is None or frame.f_code is APPLY else None
        if code is not None or k in self._compiled:
            _check_code(k, self._compiled.get(k), code, tensor)
        # Detached, lest the recomputation's own graph, of no use, live as long as its tensors.
        alias = tensor.detach()
        hooks = self._hooks
        self._tensors[k] = (alias, alias._version) if hooks is None else (hooks[0](alias), None)
        return k

    def close(self) -> None:
        """Check that as many tensors came as the first pass saved."""
        if self._next != len(self._saved):
            raise other_path(f'it saved {self._next} tensors for backward, the first pass '
                             f'{len(self._saved)}')

    def take(self, k: int) -> Tensor | None:
        """Return a tensor, and let go of it; ``None`` if it was taken before."""
        node = current_node()
        if self._held and self._holder() is not node:
            self._held = {}
        if k in self._held:
            return self._held[k]
        if k not in self._tensors:
            return None
        tensor = self._unpacked(*self._tensors.pop(k))
        if isinstance(node, PythonNode):
            self._holder = weakref.ref(node)
            self._held[k] = tensor
        return tensor

    def _unpacked(self, packed: Any, version: int | None) -> Tensor:
        if self._hooks is not None:
            return self._hooks[1](packed)  # type: ignore[no-any-return]
        tensor: Tensor = packed
        # PyTorch checks no versions behind hooks, so it is done here.
        if tensor._version != version:
            raise RuntimeError(
                'one of the variables needed for gradient computation has been modified by an '
                f'inplace operation: {tensor.dtype} of shape {tuple(tensor.shape)} is at version '
                f'{tensor._version}; expected version {version} instead')
        return tensor


def _gone() -> None:
    """Answer as a dead weak reference does."""


def _check_code(k: int, first: Saved | None, code: object | None, tensor: Tensor) -> None:
    """Compare saved tensor ``k`` with that of the first pass: [Note: Saved by compiled code].

    Raises:
        RuntimeError: Another code has saved something else.
    """
    if code is (None if first is None else first.code):
        return
    now = elements_of(tensor, every=True)
    if first is None or first.elements is None or now is None or not agree(now, first.elements):
        raise other_path(
            f'saved tensor {k} is another one, saved by other compiled code, which torch.compile '
            'has made since, or has chosen for another reason. Call the model again, with all its '
            'code compiled by now')
