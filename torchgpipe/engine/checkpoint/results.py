"""Results of layers that are excluded from recomputation: kept in the first pass, and reused.

While a checkpointed cell runs, the forward of a marked layer is replaced::

    first pass       x ──▶ layer, its nodes save their tensors ──▶ y ──▶ next layers, hollow
                                                                   └─▶ a copy, kept
    recomputation    x, not used                         the copy ──▶ y ──▶ next layers

So the layer's part of the graph is not hollow, and backward runs through it as without a
checkpoint. The recomputation skips the layer's random numbers, so that later draws are the same.
The layer's buffers and attributes are restored as for all layers.

Side effects of the layer are not repeated. A side effect that another layer could see raises: a
change of the layer's input, or of tensors that share memory with its result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.base.errors import add_note, other_path
from torchgpipe.base.private import innermost_hooks, name_of_call, unseen, untraced, versions
from torchgpipe.base.structure import (
    PLAIN,
    Kind,
    Memories,
    Tensors,
    annotated,
    check_nested,
    copy_of,
    flatten,
    leaves_of,
    share_memory,
)
from torchgpipe.engine.backward_order import get_phony
from torchgpipe.engine.checkpoint.random import Draws, States
from torchgpipe.engine.checkpoint.swaps import entry, substituted

T = TypeVar('T')

TModule = TypeVar('TModule', bound=nn.Module)

#: The attribute that marks a module.
MARK = 'torchgpipe_no_recompute'


def no_recompute(module: TModule) -> TModule:
    """Mark a layer that checkpointing does not run again. Its result is kept instead.

    Use it for a layer that takes long, or that must not be called twice. Tensors for its own
    backward are saved as without checkpointing.

    >>> layer = nn.Sequential(no_recompute(nn.Conv2d(3, 8, 3)), nn.BatchNorm2d(8), nn.ReLU())

    Args:
        module: The layer, or any module within one. It may take any arguments, and return tensors
            in values of any nesting. It must not change its input in place. Its side effects
            should matter only to itself.

    Returns:
        The module.

    Raises:
        TypeError: It is not a module, or it stashes or pops skip tensors.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            'a layer that is kept out of recomputation is an nn.Module, but this is '
            f'{type(module).__name__}; mark a module that calls it'
        )
    if any(hasattr(part, 'stashable_names') for part in module.modules()):
        raise TypeError(
            'a layer that stashes or pops cannot be kept out of recomputation, as '
            'that is done in each pass; mark modules within it'
        )
    module.__dict__[MARK] = True  # `torch.compile(module)` would set it on the wrapped module
    return module


class _Result(NamedTuple):
    """The result of one call of a layer."""

    module: nn.Module
    tensors: list[Tensor]
    requires_grad: list[bool]
    kind: Kind
    #: The states of generators before and after the call.
    start: States
    end: States


@dataclass(eq=False)
class Results:
    """The results of the marked layers of one cell, in the order of calls."""

    #: The modules of the partition, which is the first one.
    _modules: Sequence[nn.Module]
    _marked: Sequence[nn.Module]
    _draws: Draws
    _results: list[_Result] = field(default_factory=list)
    #: The index of the next result in a recomputation.
    _next: int = 0
    #: Whether a marked layer is running.
    _inside: bool = False
    #: Results that share memory with other tensors, with their versions.
    _shared: list[tuple[nn.Module, Tensor, list[int]]] = field(default_factory=list)

    def record(
        self,
        hooks: saved_tensors_hooks,
        function: Callable[[], T],
    ) -> T:
        """Run a cell for the first time."""
        output = self._with(partial(self._keep, hooks), function)
        for module, tensor, before in self._shared:
            if versions([tensor]) != before:
                raise self._refuse(
                    module,
                    'its result lies in one memory with its input, or with another part '
                    'of the result, and a later layer changed it in place',
                )
        self._shared.clear()
        return output

    def replay(self, function: Callable[[], T]) -> T:
        """Run a cell again, with the results in place of the layers."""
        self._next = 0
        output = self._with(self._give, function)
        if self._next != len(self._results):
            raise other_path(
                f'it called {self._next} layers that are kept out of recomputation, '
                f'the first pass {len(self._results)}'
            )
        return output

    def _with(
        self,
        call: Callable[..., Any],
        function: Callable[[], T],
    ) -> T:
        """Run a function while another function replaces the calls of marked layers.

        The other function is not part of a compiled layer around it. A marked layer that is
        compiled stays compiled.
        """
        swaps = []
        for module in self._marked:
            name = name_of_call(module)
            substitute = untraced(partial(call, module, getattr(module, name)))
            swaps.append(entry(module.__dict__, name, substitute))
        with substituted(swaps):
            return function()

    def _keep(
        self,
        hooks: saved_tensors_hooks,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a layer, and keep its result."""
        if self._inside:
            # A marked layer within a marked one is a part of that one's result.
            return forward(*args, **kwargs)
        input = []
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf.value, Tensor):
                input.append(leaf.value)
        before = versions(input)
        # The recomputation skips the draws between these two positions.
        start = self._draws.position()
        self._inside = True
        try:
            output = _without(hooks, partial(forward, *args, **kwargs))
        finally:
            self._inside = False
        if versions(input) != before:
            raise self._refuse(module, 'it changed its input in place')
        tensors, kind = _flatten(output)
        for x in tensors:
            if x.is_nested:
                check_nested(x)
        # A copy, because a later layer may change the result in place.
        copies = _copies(tensors)
        requires_grad = [x.requires_grad for x in tensors]
        end = self._draws.position()
        self._results.append(_Result(module, copies, requires_grad, kind, start, end))
        # In a recomputation, results are copies, so a change in place reaches only one of them.
        for k, x in enumerate(tensors):
            rest = [*tensors]
            del rest[k]
            if share_memory([x], [*input, *rest]):
                self._shared.append((module, x.detach(), versions([x])))
        return output

    def _give(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the result of a layer again, in place of a call."""
        result = None
        if self._next < len(self._results):
            result = self._results[self._next]
        if result is None or result.module is not module:
            raise other_path(
                'it called a layer that is kept out of recomputation in another order'
            )
        self._next += 1
        self._draws.go_to(result.start, result.end)
        tensors = _copies(result.tensors)
        for k, x in enumerate(tensors):
            if result.requires_grad[k]:
                phony = get_phony(x.device, requires_grad=True)
                tensors[k] = _Again.apply(phony, x)  # type: ignore[no-untyped-call]
        return result.kind(tensors)

    def _refuse(self, layer: nn.Module, why: str) -> RuntimeError:
        names = {module: name for name, module in self._modules[0].named_modules()}
        return RuntimeError(
            f"layer '{names[layer]}' ({type(layer).__name__}) cannot be kept out of "
            f'recomputation: {why}, which a recomputation would not do. Let it '
            'give a new tensor (tensor.clone()), or do not mark it'
        )


class _Again(torch.autograd.Function):
    """Make a tensor require grad. Unlike a leaf, it may be changed in place by a later layer.

    Takes ``(phony, tensor)``. No gradient passes through it.
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, x: Tensor) -> Tensor:
        return x.detach()  # [Note: Identity without a view]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors; those that share a memory share its copy."""
    memories: Memories = {}
    with unseen():
        return [copy_of(x, memories) for x in tensors]


def _flatten(output: Any) -> tuple[Tensors, Kind]:
    if isinstance(output, PLAIN):
        return (), lambda tensors: output
    try:
        tensors, kind = flatten(output)
        return tensors, annotated(tensors, kind)
    except TypeError as error:
        add_note(error, 'The same goes for results of layers that are kept out of recomputation.')
        raise


def _without(
    hooks: saved_tensors_hooks,
    function: Callable[[], T],
) -> T:
    """Call a function without these hooks, unless others are active within them."""
    if innermost_hooks() != (hooks.pack_hook, hooks.unpack_hook):
        return function()
    hooks.__exit__()
    try:
        return function()
    finally:
        hooks.__enter__()
