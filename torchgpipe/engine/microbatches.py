"""Micro-batches: scatter a mini-batch, and gather the outputs into one output.

::

    input      {'x': (8, 3), 'table': NoChunk((5, 2))}        batch dimension 0, 4 chunks
    cut        {'x': (2, 3), 'table': (5, 2)}  × 4            views; shared tensors are not split
    output     {'y': (2, 7), 'loss': ()}  × 4
    gather     {'y': (8, 7), 'loss': ()}        'y' put together, 'loss' by a rule

A *rule* gives an option for each tensor of a value. A dict or a sequence is a rule by the keys of
the value, to its own depth. For example, ``{'mask': 1}`` is a rule for ``mask`` and all tensors in
it.
"""

import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.structure import (
    Annotated,
    Arguments,
    Kind,
    Leaf,
    Path,
    Repeated,
    Tensors,
    annotated,
    bare,
    flatten_nested,
    is_among,
    item_at,
    leaves_of,
    once,
    path_name,
)

#: The way out for a mini-batch without samples in one process.
SKIP = 'skip empty batches'


@dataclass(slots=True, eq=False)
class Chunk:
    """One micro-batch.

    >>> import torch
    >>> from torchgpipe.base.structure import flatten
    >>> batch = Chunk(*flatten((torch.zeros(2, 3), None)))
    >>> len(batch.tensors), batch.value[0].shape
    (1, torch.Size([2, 3]))
    """

    tensors: Tensors
    kind: Kind

    @property
    def value(self) -> Any:
        """The value, in new containers."""
        return self.kind(self.tensors)


def cut(
    input: Any, chunks: int, batch_dim: Any = 0, what: str = 'input', empty: str = SKIP
) -> tuple[list[Chunk], list[int], list[int]]:
    """Split a mini-batch along its batch dimension.

    >>> import torch
    >>> batches, sizes, shared = cut(torch.zeros(7, 2), chunks=3)
    >>> sizes, batches[0].value.shape
    ([3, 2, 2], torch.Size([3, 2]))

    Args:
        input: A tensor of shape ``(batch, …)``, or a structure of such tensors. Scalars and the
            contents of a :class:`~torchgpipe.NoChunk` are the same for all micro-batches.
        batch_dim: The rule for the batch dimension; ``None`` for tensors that are not split.

    Returns:
        ``min(chunks, batch)`` batches, whose sizes differ by one at most, larger ones first; these
        sizes; and the indices of tensors that all micro-batches share.

    Raises:
        TypeError: The input contains a leaf that is neither a tensor nor a plain value.
        ValueError: Batch sizes disagree, are zero, or there is no tensor to split.
    """
    tensors, kind, dims = _read(input, batch_dim)
    size = _batch_size(input, tensors, dims, what, chunks, empty)
    if min(chunks, size) > 1 and not isinstance(input, Tensor):
        _check_lists(input, size, what)
    # A tensor in several places with the same rule is also one tensor in each micro-batch.
    keys = [*zip(map(id, tensors), dims)]
    if len({*keys}) < len(keys):
        tensors, kind = once(tensors, kind, keys)
        dims = [dim for _, dim in dict.fromkeys(keys)]
    m = min(chunks, size)
    sizes = [size // m + (i < size % m) for i in range(m)]
    shared = [k for k, dim in enumerate(dims) if dim is None]
    if m == 1:
        return [Chunk(tensors, kind)], sizes, shared
    parts = [(x,) * m if dim is None else x.split(sizes, dim) for x, dim in zip(tensors, dims)]
    return [Chunk(xs, kind) for xs in zip(*parts)], sizes, shared


def _read(input: Any, batch_dim: Any) -> tuple[Tensors, Kind, list[int | None]]:
    """Return the tensors of a value, its kind, and the batch dimension of each tensor."""
    if isinstance(input, Tensor):
        kind = annotated([input], bare) if input.__dict__ else bare
        return (input,), kind, [batch_dim if isinstance(batch_dim, int) else 0]
    if isinstance(input, tuple) and not input:
        raise ValueError('the input is an empty tuple; a pipeline needs at least one tensor')
    tensors, structure = flatten_nested(input)
    # The paths of several arguments begin with their positions and names.
    start = 1 if isinstance(input, Arguments) else 0
    return (
        tensors,
        annotated(tensors, structure),
        [
            _batch_dim(leaf, leaf.path[start:], batch_dim)
            for leaf in leaves_of(input)
            if isinstance(leaf.value, Tensor)
        ],
    )


def _batch_dim(leaf: Leaf, path: Path, rule: Any) -> int | None:
    if leaf.shared or leaf.value.dim() == 0:
        return None
    found, _ = look_up(rule, path)
    return 0 if found is DEFAULT else found


def _batch_size(
    input: Any,
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    what: str,
    chunks: int,
    empty: str,
) -> int:
    sizes = []
    for k, (x, dim) in enumerate(zip(tensors, dims)):
        if dim is not None:
            if x.layout is not torch.strided or x.is_nested or not -x.dim() <= dim < x.dim():
                raise _not_cut(_name(input, k, what), x, dim)
            sizes.append(x.shape[dim])
    if not sizes:
        raise ValueError(
            f'no tensor of the {what} has a batch dimension, so there is nothing to '
            f'split (shapes: {[tuple(x.shape) for x in tensors]})'
        )
    if len(set(sizes)) > 1:
        lists = _lists_in(input, Tensor)
        if chunks == 1 and lists:  # Nothing is split, so a list may have a tensor per sample.
            return max(map(len, lists.values()))
        found = ', '.join(
            f'{_name(input, k, what)}: {x.shape[dim]}'
            for k, (x, dim) in enumerate(zip(tensors, dims))
            if dim is not None
        )
        ways = (
            'Mark what all micro-batches share, like a table or position ids: '
            'NoChunk(tensor). Say where the batch is, if it is not dimension 0: '
            'GPipe(…, batch_dim=1)'
        )
        if lists:
            ways = _per_sample(next(iter(lists)), what)
        raise ValueError(
            f'the tensors of the {what} disagree in batch size: {found}; every one '
            f'must hold the same samples. {ways}'
        )
    if sizes[0] == 0:
        raise ValueError(
            'the batch is empty: the batch dimension of the input has size 0, at '
            f'least 1 is needed (shapes: {[tuple(x.shape) for x in tensors]}); '
            f'{empty}'
        )
    return sizes[0]


def _lists_in(input: Any, kind: type) -> dict[Path, list[Any]]:
    """Return the lists of a value whose items are split or plain, and all of a type."""
    paths = dict.fromkeys(
        leaf.path[:-1] for leaf in leaves_of(input) if leaf.path and not leaf.shared
    )
    lists = {path: item_at(input, path) for path in paths}
    return {
        path: items
        for path, items in lists.items()
        if type(items) is list and len(items) > 1 and all(isinstance(item, kind) for item in items)
    }


def _check_lists(input: Any, size: int, what: str) -> None:
    """Raise if a list has a plain value for each sample, because lists are not split."""
    for path, items in _lists_in(input, Number).items():
        if len(items) == size:
            raise ValueError(
                f'{what}{path_name(path)} is a list of as many values as there are samples '
                f'({size}), and each micro-batch would get the whole list. '
                + _per_sample(path, what)
            )


def _per_sample(path: Path, what: str) -> str:
    return (
        f'If the list {what}{path_name(path)} has an item for each sample, pass a tensor '
        'whose dimension 0 is the batch, such as torch.tensor(list) or padded samples, or use '
        'chunks=1. If all micro-batches share the list, pass NoChunk(list)'
    )


def _not_cut(name: str, x: Tensor, dim: int) -> ValueError:
    if x.is_nested:
        why = ('is a nested tensor', 'pad it, or make it nested in the first layer')
    elif x.layout is not torch.strided:
        why = (f'is sparse ({x.layout})', 'make it dense, or make it sparse in the first layer')
    elif x.dim() == 0:
        why = ('has no dimensions', 'give it a batch dimension')
    else:
        why = (
            f'has no dimension {dim} (its shape is {tuple(x.shape)})',
            'say where its batch is by batch_dim',
        )
    return ValueError(
        f'{name} {why[0]}, so it cannot be split into micro-batches; {why[1]}, or '
        'mark it as the same for all micro-batches: NoChunk(tensor)'
    )


def _name(value: Any, k: int, what: str = 'input') -> str:
    """Name tensor ``k`` of a value: ``input['labels']``."""
    paths = [leaf.path for leaf in leaves_of(value) if isinstance(leaf.value, Tensor)]
    name = path_name(paths[k])
    return name[1:] if name[:6] in ('.args[', '.kwarg') else what + name


DEFAULT = object()


def look_up(rule: Any, path: Iterable[Any]) -> tuple[Any, bool]:
    """Return the entry of a rule for a path, and whether the rule has keys of this path."""
    named = False
    for key in path:
        if isinstance(rule, Mapping):
            rule = rule.get(key, DEFAULT)
        elif isinstance(rule, (list, tuple)):
            rule = rule[key] if isinstance(key, int) and key < len(rule) else DEFAULT
        else:
            break
        named = True
    if isinstance(rule, (Mapping, list, tuple)):
        return DEFAULT, named
    return rule, named


def fit_rule(rule: Any, input: Any, layers: Iterable[nn.Module]) -> Any:
    """Convert the rule for the batch dimension to the keys of an input.

    Raises:
        ValueError: A key of the rule does not exist in the input.
    """
    if not isinstance(rule, (Mapping, list, tuple)):
        return rule
    if isinstance(input, Tensor):
        return fit_rule(rule, Arguments(input), layers).get(0, 0)
    if not isinstance(input, Arguments):
        _check_used(rule, [leaf.path for leaf in leaves_of(input)], 'the input')
        return rule
    names = _names_of_arguments(next(iter(layers)))
    by_key = dict(rule) if isinstance(rule, Mapping) else dict(enumerate(rule))
    positions = {name: position for position, name in enumerate(names or ())}
    named = {position: name for name, position in positions.items()}
    given: list[tuple[Any, Any]] = [(i, named.get(i)) for i in range(len(input.args))]
    given += [(name, positions.get(name)) for name in input.kwargs]
    fitted = {
        key: by_key[each]
        for key, other in given
        for each in (key, other)
        if each is not None and each in by_key
    }
    known = {*positions, *named, *(key for key, _ in given)}
    if names is not None:
        _check_known(by_key, known, 'the call')
    _check_used(fitted, [leaf.path[1:] for leaf in leaves_of(input)], 'the call')
    return fitted


def check_arguments(name: str, layer: nn.Module, input: Arguments) -> None:
    """Check that a first layer takes several arguments."""
    try:
        signature = inspect.signature(layer.forward)
    except ValueError:  # It is not a Python function.
        return
    try:
        signature.bind(*input.args, **input.kwargs)
    except TypeError as error:
        raise TypeError(
            f"the first layer, '{name}' ({type(layer).__name__}), cannot be called with these "
            f'{len(input.args)} arguments and keywords {sorted(input.kwargs)}: {error}. Its '
            f'forward takes {signature}. What the model is called with goes to its first layer '
            'alone; what later layers need travels in the value that each layer returns, such as '
            'a dict, or as a skip (torchgpipe.skip)'
        ) from None


def _names_of_arguments(layer: nn.Module) -> list[str] | None:
    """Return the names of a layer's arguments in order; ``None`` if it takes any."""
    try:
        parameters = inspect.signature(layer.forward).parameters
    except ValueError:  # It is not a Python function.
        return None
    kinds = {parameter.kind for parameter in parameters.values()}
    return None if kinds & {_ANY, _ANY_NAMED} else list(parameters)


_ANY = inspect.Parameter.VAR_POSITIONAL
_ANY_NAMED = inspect.Parameter.VAR_KEYWORD


def _check_used(rule: Any, paths: Sequence[Path], where: str) -> None:
    """Check that each key of a rule exists in a value."""
    if isinstance(rule, (Mapping, list, tuple)):
        entries = dict(rule) if isinstance(rule, Mapping) else dict(enumerate(rule))
        _check_known(entries, {path[0] for path in paths if path}, where)
        for key, each in entries.items():
            _check_used(each, [path[1:] for path in paths if path and path[0] == key], where)


def _check_known(entries: Mapping[Any, Any], known: Container[Any], where: str) -> None:
    unknown = [key for key in entries if key not in known]
    if unknown:
        raise ValueError(
            f'batch_dim says something of {unknown[0]!r}, but there is nothing of '
            f'that name or at that place in {where}; a rule goes by the keys of the '
            "input, or by the positions or names of the first layer's arguments"
        )


def check_rule(name: str, rule: Any, allowed: Sequence[Any], functions: bool = False) -> None:
    """Check that a rule consists of integers, allowed values and, optionally, functions.

    Raises:
        ValueError: It contains another value.
    """
    if isinstance(rule, Mapping):
        for each in rule.values():
            check_rule(name, each, allowed, functions)
    elif isinstance(rule, (list, tuple)):
        for each in rule:
            check_rule(name, each, allowed, functions)
    elif (
        not (functions and callable(rule))
        and rule not in allowed
        and (isinstance(rule, bool) or not isinstance(rule, int))
    ):
        others = ', '.join(map(repr, allowed))
        raise ValueError(
            f'{name} must be a dimension, one of {others}, or a dict or a sequence '
            f'of these by the keys of the value, but has {rule!r}'
        )


def value_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the single argument of a pipeline's call, or :class:`Arguments` for several."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and [*kwargs] == ['input']:  # the argument's name in `nn.Sequential.forward`
        return kwargs['input']
    return Arguments(*args, **kwargs)


# --- the output
# ----------------------------------------------------------------------------------


#: The mean of values that are no means over samples, such as a router's auxiliary loss. It is
#: not the value for the mini-batch, and nothing compares it.
MICRO_BATCH_MEAN = 'micro-batch mean'

#: The reductions for tensors of micro-batches without a batch dimension.
REDUCTIONS = ('mean', 'sum', 'stack', MICRO_BATCH_MEAN)


def check_rules(batch_dim: Any, gather: Any) -> None:
    """Check the rules for the batch dimension and for gathering."""
    check_rule('batch_dim', batch_dim, [None])
    check_rule('gather', gather, [None, *REDUCTIONS], functions=True)
    if batch_dim is None:
        raise ValueError(
            'batch_dim is None, so there would be nothing to split; name the '
            "dimension, or those of parts: batch_dim={'table': None}"
        )


def gather(
    batches: Sequence[Chunk],
    sizes: Sequence[int] | None = None,
    rule: Any = None,
    batch_dim: Any = 0,
    shared: Sequence[Tensor] = (),
) -> Any:
    """Gather micro-batches into one value.

    >>> import torch
    >>> gather([Chunk((torch.zeros(2, 3),), bare), Chunk((torch.ones(1, 3),), bare)]).shape
    torch.Size([3, 3])

    Args:
        batches: At least one batch, all of one structure.
        sizes: The number of input samples in each batch. If there are several batches, outputs
            must have as many.
        rule: The rule for gathering: a dimension, one of ``REDUCTIONS``, or a function of the
            tensors of all micro-batches. A word or a function without keys
            applies to scalars only.
        batch_dim: The dimension for all other tensors. A rule by keys means dimension 0.
        shared: Tensors of the first batch that are the same for all micro-batches.

    Returns:
        A value of the same structure, with tensors of shape ``(batch, …)``.

    Raises:
        ValueError: The number of samples or the structure changed within the pipeline, or there is
            a scalar without a rule.
    """
    if any(isinstance(batch.kind, Repeated) for batch in batches):
        batches = [_spread(batch) for batch in batches]
    batch_dim = batch_dim if isinstance(batch_dim, int) else 0
    first = batches[0]
    if any(
        len(batch.tensors) != len(first.tensors) or batch.kind != first.kind for batch in batches
    ):
        raise ValueError(
            'the micro-batches came out of the pipeline with different numbers of '
            'tensors, or with other plain values or attributes: '
            f'{[len(x.tensors) for x in batches]} tensors, '
            f'{", ".join(map(_outline, batches))}'
        )
    paths = (
        [()]
        if first.kind is bare
        else [leaf.path for leaf in leaves_of(first.value) if isinstance(leaf.value, Tensor)]
    )
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


def _spread(batch: Chunk) -> Chunk:
    """Return a batch with a tensor for each place of the value."""
    kind = batch.kind
    if isinstance(kind, Repeated):
        return Chunk(kind.spread(batch.tensors), kind.kind)
    return batch


def _outline(batch: Chunk) -> str:
    """Format a value, with shapes in place of its tensors, and the attributes of these."""
    value = repr(batch.kind([tuple(x.shape) for x in batch.tensors]))  # type: ignore[misc]
    if isinstance(batch.kind, Annotated):
        attributes = [
            {name: each(()) for name, each in structures.items()}
            for structures in batch.kind.attributes
            if structures
        ]
        value += f' with attributes {attributes}'
    return value


def _rule_of(rule: Any, path: Path, x: Tensor, batch_dim: int) -> Any:
    found, named = look_up(rule, path)
    if (
        found is DEFAULT
        or found is None
        or (not isinstance(found, int) and not named and x.dim() > 0)
    ):
        return batch_dim
    return found


def _join(xs: Sequence[Tensor], sizes: Sequence[int] | None, rule: Any, path: Path) -> Tensor:
    """Gather one tensor from all micro-batches."""
    if isinstance(rule, int):
        # A single micro-batch is the mini-batch, so its output may have any size.
        expected = sizes if len(xs) > 1 else None
        for i, x in enumerate(xs):
            if not -x.dim() <= rule < x.dim() or (
                expected is not None and x.shape[rule] != expected[i]
            ):
                raise _not_joined(i, x, sizes, rule, 'output' + path_name(path))
    beside = {
        tuple(size for k, size in enumerate(x.shape) if rule not in (k, k - x.dim())) for x in xs
    }
    if len(beside) > 1:
        raise _mixed(xs, rule, 'output' + path_name(path))
    if isinstance(rule, int):
        return xs[0] if len(xs) == 1 else torch.cat(list(xs), rule)
    if callable(rule):
        return rule(xs)  # type: ignore[no-any-return]
    if rule in ('mean', MICRO_BATCH_MEAN):
        assert sizes is not None
        xs = [x * (size / sum(sizes)) for x, size in zip(xs, sizes)]
    if rule == 'stack':
        return torch.stack(list(xs))
    return torch.stack(list(xs)).sum(0)


def _mixed(xs: Sequence[Tensor], rule: Any, name: str) -> ValueError:
    shapes = ', '.join(map(str, dict.fromkeys(tuple(x.shape) for x in xs)))
    if isinstance(rule, int):
        how = f'along dimension {rule}'
    elif callable(rule):
        how = 'by a count'
    else:
        how = f'by {rule!r}'
    return ValueError(
        f'micro-batches came out with shapes {shapes} as {name}: outputs are gathered {how}, so '
        'nothing else in their shapes may differ. A dimension that goes with the number of '
        'samples is that of a model that mixes them, as a matrix of their similarities does: a '
        'micro-batch has another one, so compute it after the pipeline. Where layers pad, let '
        'them pad all micro-batches to one length'
    )


def _not_joined(i: int, x: Tensor, sizes: Sequence[int] | None, dim: int, name: str) -> ValueError:
    went = '' if sizes is None else f'went into the pipeline with {sizes[i]} samples and '
    if x.dim() == 0:
        return ValueError(
            f'micro-batch {i} {went}came out with shape () as {name}, a scalar: say what becomes '
            "of the scalars of micro-batches: GPipe(…, gather='mean') where each is a mean over "
            "samples, 'sum' or 'stack'. A mean over anything else, such as labels that are not "
            'padding, is not the mean of these means: let gather count them, gather=lambda ids, '
            'mask, labels: (labels != -100).sum(), a function that is called as the model is; or '
            'take a step, whose step(…, normalizer=…) counts. Or reduce over the batch after the '
            'pipeline, not in it'
        )
    return ValueError(
        f'micro-batch {i} {went}came out with shape {tuple(x.shape)} as {name}: outputs are '
        f'gathered along dimension {dim}, which must be the batch dimension. Say where the batch '
        "is, or what else to do with it, as in GPipe(…, gather={'labels': 1, 'counts': 'sum'}), "
        'or reduce over the batch after the pipeline, not in it'
    )
