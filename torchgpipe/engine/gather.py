"""Gather the outputs of micro-batches into the output of the mini-batch.

::

    output     {'y': (2, 7), 'loss': ()}  × 4
    gather     {'y': (8, 7), 'loss': ()}        'y' put together, 'loss' by a rule
"""
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.engine.memory import is_among
from torchgpipe.engine.scatter import DEFAULT, Batch, check_rule, look_up
from torchgpipe.structure import Path, Repeated, bare, leaves_of, path_name

__all__ = ['REDUCTIONS', 'check_rules', 'gather']

#: How tensors of micro-batches that have no batch dimension may become one.
REDUCTIONS = ('mean', 'sum', 'stack')


def check_rules(batch_dim: Any, gather: Any) -> None:
    """Check what is said of the batch dimension, and of tensors of micro-batches."""
    check_rule('batch_dim', batch_dim, [None])
    check_rule('gather', gather, [None, *REDUCTIONS], functions=True)
    if batch_dim is None:
        raise ValueError('batch_dim is None, so there would be nothing to split; name the '
                         'dimension, or those of parts: batch_dim={\'table\': None}')


def gather(batches: Sequence[Batch], sizes: Sequence[int] | None = None, rule: Any = None,
           batch_dim: Any = 0, shared: Sequence[Tensor] = ()) -> Any:
    """Put micro-batches together.

    >>> import torch
    >>> gather([Batch((torch.zeros(2, 3),), bare), Batch((torch.ones(1, 3),), bare)]).shape
    torch.Size([3, 3])

    Args:
        batches: At least one batch, all of one structure.
        sizes: How many samples went into each, to check that as many came out.
        rule: For tensors, by which dimension they are put together, or ``'mean'``, ``'sum'`` or
            ``'stack'``, or a function of those of all micro-batches. Such a word or a function
            alone is for scalars only.
        batch_dim: The dimension for all others; a rule for the input means the first one.
        shared: Tensors of the first one that are the same for all micro-batches.

    Returns:
        A value of that structure, its tensors of shape ``(batch, …)``.

    Raises:
        ValueError: The number of samples or the structure changed within the pipeline, or there is
            a scalar without a rule.
    """
    if any(isinstance(batch.kind, Repeated) for batch in batches):
        batches = [_spread(batch) for batch in batches]
    batch_dim = batch_dim if isinstance(batch_dim, int) else 0
    first = batches[0]
    if any(len(batch.tensors) != len(first.tensors) or batch.kind != first.kind
           for batch in batches):
        raise ValueError('the micro-batches came out of the pipeline with different numbers of '
                         'tensors, or with other plain values: '
                         f'{[len(x.tensors) for x in batches]} tensors, '
                         f'{", ".join(map(_outline, batches))}')
    paths = [()] if first.kind is bare else [
        leaf.path for leaf in leaves_of(first.value) if isinstance(leaf.value, Tensor)]
    joined: dict[Any, Tensor] = {}
    found = []
    for path, *xs in zip(paths, *[batch.tensors for batch in batches]):
        own_rule = batch_dim if rule is None else _rule_of(rule, path, xs[0], batch_dim)
        key = (*map(id, xs), own_rule)
        if key not in joined:
            is_shared = shared and is_among(xs[0], shared)
            joined[key] = xs[0] if is_shared else _join(xs, sizes, own_rule, path)
        found.append(joined[key])
    return first.kind(found)


def _spread(batch: Batch) -> Batch:
    """Return a batch with a tensor for each place of the value."""
    kind = batch.kind
    return Batch(kind.spread(batch.tensors), kind.kind) if isinstance(kind, Repeated) else batch


def _outline(batch: Batch) -> str:
    """Write a value with the shapes of its tensors in their places."""
    return repr(batch.kind([tuple(x.shape) for x in batch.tensors]))  # type: ignore[misc]


def _rule_of(rule: Any, path: Path, x: Tensor, batch_dim: int) -> Any:
    found, named = look_up(rule, path)
    if found is DEFAULT or found is None or (
            not isinstance(found, int) and not named and x.dim() > 0):
        return batch_dim
    return found


def _join(xs: Sequence[Tensor], sizes: Sequence[int] | None, rule: Any, path: Path) -> Tensor:
    """Put one tensor of all micro-batches together."""
    if isinstance(rule, int):
        for i, x in enumerate(xs):
            if not -x.dim() <= rule < x.dim() or (
                    sizes is not None and x.shape[rule] != sizes[i]):
                raise _not_joined(i, x, sizes, rule, 'output' + path_name(path))
    beside = {tuple(size for k, size in enumerate(x.shape) if rule not in (k, k - x.dim()))
              for x in xs}
    if len(beside) > 1:
        raise _mixed(xs, rule, 'output' + path_name(path))
    if isinstance(rule, int):
        return xs[0] if len(xs) == 1 else torch.cat(list(xs), rule)
    if callable(rule):
        return rule(xs)  # type: ignore[no-any-return]
    if rule == 'mean':
        assert sizes is not None
        xs = [x * (size / sum(sizes)) for x, size in zip(xs, sizes)]
    return torch.stack(list(xs)) if rule == 'stack' else torch.stack(list(xs)).sum(0)


def _mixed(xs: Sequence[Tensor], rule: Any, name: str) -> ValueError:
    shapes = ', '.join(map(str, dict.fromkeys(tuple(x.shape) for x in xs)))
    how = (f'along dimension {rule}' if isinstance(rule, int)
           else 'by a count' if callable(rule) else f'by {rule!r}')
    return ValueError(
        f'micro-batches came out with shapes {shapes} as {name}: outputs are gathered {how}, so '
        'nothing else in their shapes may differ. A dimension that goes with the number of '
        'samples is that of a model that mixes them, as a matrix of their similarities does: a '
        'micro-batch has another one, so compute it after the pipeline. Where layers pad, let '
        'them pad all micro-batches to one length')


def _not_joined(i: int, x: Tensor, sizes: Sequence[int] | None, dim: int, name: str
                ) -> ValueError:
    went = '' if sizes is None else f'went into the pipeline with {sizes[i]} samples and '
    if x.dim() == 0:
        return ValueError(
            f'micro-batch {i} {went}came out with shape () as {name}, a scalar: say what becomes '
            "of the scalars of micro-batches: GPipe(…, gather='mean') where each is a mean over "
            "samples, 'sum' or 'stack'. A mean over anything else, such as labels that are not "
            "padding, is not the mean of these means: let gather count them, gather=lambda ids, "
            'mask, labels: (labels != -100).sum(), a function that is called as the model is; or '
            'take a step, whose step(…, normalizer=…) counts. Or reduce over the batch after the '
            'pipeline, not in it')
    return ValueError(
        f'micro-batch {i} {went}came out with shape {tuple(x.shape)} as {name}: outputs are '
        f'gathered along dimension {dim}, which must be the batch dimension. Say where the batch '
        "is, or what else to do with it, as in GPipe(…, gather={'labels': 1, 'counts': 'sum'}), "
        'or reduce over the batch after the pipeline, not in it')
