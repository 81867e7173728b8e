"""Leaves: tensors that accumulate gradients of parameters during a step.

::

    parameter ──detach──▶ leaf          one for all places of a parameter
                            ├──▶ cell of micro-batch 0     backward: leaf.grad = g0
                            └──▶ cell of micro-batch 1     backward: leaf.grad = g0 + g1

    at the end      leaf.grad ──▶ Give ──▶ hooks ──▶ parameter.grad

So hooks of a parameter see its whole gradient, once in a step, and a step that fails leaves no
part of it in ``parameter.grad``. What a layer keeps of a parameter in another place than its
``_parameters`` is the parameter itself, and its gradient goes there at once.
"""
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe.base.structure import Slot
from torchgpipe.engine.split_backward import DeferredWork, Weight
from torchgpipe.engine.substitute import Swap, substituted

__all__ = ['Give', 'Leaves', 'edge_of', 'give', 'leaf_of', 'within']


class Leaves:
    """The leaves of one step.

    Args:
        dtype: In which gradients of micro-batches are added up, if not in the parameter's.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._leaves: dict[tuple[int, int], tuple[Tensor, nn.Parameter]] = {}

    def swaps(self, modules: Iterable[nn.Module], copies: Mapping[Slot, Tensor],
              deferred: DeferredWork | None = None) -> list[Swap]:
        """Return how to put leaves in place of the parameters of some modules.

        Args:
            modules: The modules.
            copies: What has been put in the place of some of these parameters.
            deferred: Where gradients of weights are put off to, if they are.
        """
        found = [(module, name, copies.get((module, name), x)) for module in modules
                 for name, x in module._parameters.items() if x is not None]
        leaves = [(module, name, x, self._leaf_of(x, deferred)) for module, name, x in found
                  if x.requires_grad]
        return [Swap(partial(_put, module, name, leaf), partial(_put, module, name, x, leaf))
                for module, name, x, leaf in leaves]

    def _leaf_of(self, x: Tensor, deferred: DeferredWork | None) -> nn.Parameter:
        key = id(x), id(deferred)
        if key not in self._leaves:
            data = x.detach()
            if deferred is None or type(data) is not Tensor:
                leaf = nn.Parameter(data)
            else:
                leaf = Weight(data)
                leaf.deferred = deferred
            leaf.__dict__.update(x.__dict__)
            if self._dtype is not None:
                leaf.grad_dtype = self._dtype
            self._leaves[key] = x, leaf
        return self._leaves[key][1]

    @property
    def numbers(self) -> set[int]:
        """The numbers of the leaves, by which `id` tells them."""
        return {id(leaf) for _, leaf in self._leaves.values()}

    def take(self, only: Container[int] | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters and copies that have a gradient, with that, and let go of it.

        Args:
            only: The numbers of some parameters, by ``id``; by default all.
        """
        found = []
        for x, leaf in self._leaves.values():
            if only is not None and id(x) not in only:
                continue
            if x.layout is torch.strided and leaf.data_ptr() != x.data_ptr():
                x.data = leaf.data  # A layer has put another tensor there.
            if leaf.grad is not None:
                found.append((x, leaf.grad))
                leaf.grad = None
        return found


def within(swaps: Sequence[Swap], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs with leaves in their places."""
    return partial(_run_within, swaps, function)


def _run_within(swaps: Sequence[Swap], function: Callable[..., Any], *args: Any, **kwargs: Any
                ) -> Any:
    with substituted(swaps):
        return function(*args, **kwargs)


def _put(module: nn.Module, name: str, new: Tensor, old: Tensor | None = None) -> None:
    """Put a parameter in its place; if an old one is named, only in place of that."""
    # In a recomputation, modules may have other dictionaries than when the step began. That of
    # TorchScript is none; and the layer may have put another parameter there.
    parameters: Any = module._parameters
    if old is None or name in parameters and parameters[name] is old:
        parameters[name] = new


def give(gradients: list[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to those of leaves, through their hooks; or send them on in their graphs.

    Args:
        gradients: Tensors that require grad, with a gradient of each. The list is emptied, so that
            nobody but a parameter has its gradient, and autograd need not copy it.
    """
    if gradients:
        tensors = [x for x, _ in gradients]
        grads = [grad for _, grad in gradients]
        gradients.clear()
        Give.apply(grads, *tensors).backward()  # type: ignore[no-untyped-call]


class Give(torch.autograd.Function):
    """Return gradients that are known: ``Give.apply(gradients, *tensors)``."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, phony: Tensor) -> tuple[Tensor | None, ...]:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def edge_of(y: Tensor) -> GradientEdge:
    """Return where the gradient of a tensor enters its graph, and keep that graph alive."""
    # PyTorch does so by a view, of which a sparse tensor has none.
    return get_gradient_edge(y if y.layout is torch.strided or y.is_nested else y.clone())


def leaf_of(x: Tensor) -> Tensor:
    """Return a tensor as a leaf of another graph."""
    return x.detach().requires_grad_(x.requires_grad)
