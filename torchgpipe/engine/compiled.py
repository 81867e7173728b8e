"""Compiled layers: compile supported layers, and run their backward in several threads.

Autograd has a thread for each accelerator, and gives all of them the same copy of the caller's
context variables. Compiled code enters this copy in backward, which two threads cannot do
concurrently ("cannot enter context"). In a pipeline, two threads would do so.
"""
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.private import compiled_codes, is_compiled, is_compiled_module, own_context

__all__ = ['compiled', 'has_compiled', 'part_contexts']


def has_compiled(partition: nn.Module) -> bool:
    """Return whether a partition is compiled, or a layer in it."""
    return 'forward' in partition.__dict__ or any(
        map(is_compiled_module, partition.modules()))


def part_contexts(inputs: Iterable[Any], outputs: Iterable[Tensor]) -> None:
    """Give each compiled node its own context.

    Args:
        inputs: The nodes at which the searched part of the graph begins.
        outputs: The tensors with which it ends.
    """
    if not compiled_codes():
        return
    seen = set(inputs)
    found: list[Any] = [y.grad_fn for y in outputs]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_compiled(node):
            node.register_prehook(own_context)
        found += [next for next, _ in node.next_functions]


def compiled(layers: nn.Sequential, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that calls layers in order, compiled together where possible.

    Args:
        layers: The layers.
        *args: The positional arguments of :func:`torch.compile`.
        **kwargs: The keyword arguments of :func:`torch.compile`.
    """
    # PyTorch does not compile a loop if it cannot compile one of its layers.
    is_left = [hasattr(layer.forward, '_torchdynamo_disable') for layer in layers]
    runs = [partial(torch.compile(_own_code(_run), *args, **kwargs), layers,
                    tuple([name for name, _ in group]))
            for _, group in groupby(zip(layers._modules, is_left), itemgetter(1))]
    return partial(_run_all, runs)


def _run(layers: nn.Sequential, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of some of the layers."""
    name, *others = names
    value = layers._modules[name](*args, **kwargs)
    for name in others:
        value = layers._modules[name](value)
    return value


def _own_code(function: Any) -> Callable[..., Any]:
    """Copy a function, because PyTorch limits how often it compiles the same code."""
    return FunctionType(function.__code__.replace(), function.__globals__)


def _run_all(runs: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    run, *others = runs
    value = run(*args, **kwargs)
    for run in others:
        value = run(value)
    return value
