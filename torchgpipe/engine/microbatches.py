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
from functools import cached_property
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

#: The types of rules by keys of a value.
_BY_KEYS = Mapping, list, tuple


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


# The input.


@dataclass(eq=False)
class _FlatInput:
    """A mini-batch, flattened once for the rule, the split and all errors."""

    value: Any
    #: The name of the value in errors: "input" or "target".
    name: str
    tensors: Tensors = ()
    kind: Kind = bare

    def flatten(self) -> None:
        """Set the tensors and the kind."""
        value = self.value
        if isinstance(value, Tensor):
            # Most models are called with one tensor without attributes, which needs no structure.
            self.tensors = (value,)
            if value.__dict__:
                self.kind = annotated([value], bare)
            return
        if isinstance(value, tuple) and not value:
            raise ValueError('the input is an empty tuple; a pipeline needs at least one tensor')
        self.tensors, structure = flatten_nested(value)
        self.kind = annotated(self.tensors, structure)

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The tensors and plain values, with their paths."""
        return leaves_of(self.value)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors, for errors."""
        return [tuple(x.shape) for x in self.tensors]

    def name_of(self, k: int) -> str:
        """Return the name of tensor ``k``, such as ``input['labels']``."""
        leaf = self.tensor_leaves()[k]
        name = path_name(leaf.path)
        if isinstance(self.value, Arguments):
            return name.removeprefix('.')  # args[0], kwargs['labels']
        return self.name + name

    def tensor_leaves(self) -> list[Leaf]:
        """Return the leaves that are tensors, in the order of ``tensors``."""
        return [leaf for leaf in self.leaves if isinstance(leaf.value, Tensor)]

    def rule_path(self, leaf: Leaf) -> Path:
        """Return the keys of a rule that lead to a leaf."""
        if isinstance(self.value, Tensor):
            return (0,)  # the first argument
        if isinstance(self.value, Arguments):
            return leaf.path[1:]  # without "args" or "kwargs"
        return leaf.path


def cut(
    input: Any,
    chunks: int,
    batch_dim: Any = 0,
    what: str = 'input',
    empty: str = SKIP,
    layers: Iterable[nn.Module] | None = None,
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
        empty: The way out for a mini-batch without samples, for the error.
        layers: The layers of the model, the first of which is called with the input. A rule by
            keys may then use positions and names of its arguments, and has to fit.

    Returns:
        ``min(chunks, batch)`` batches, whose sizes differ by one at most, larger ones first; these
        sizes; and the indices of tensors that all micro-batches share.

    Raises:
        TypeError: The input contains a leaf that is neither a tensor nor a plain value.
        ValueError: Batch sizes disagree, are zero, or there is no tensor to split. Or a key of the
            rule does not exist in the input.
    """
    flat = _FlatInput(input, what)
    if layers is not None and isinstance(batch_dim, _BY_KEYS):
        batch_dim = _fit_rule(batch_dim, flat, layers)
    flat.flatten()
    if isinstance(input, Tensor):
        # A single tensor is always split. Keys of a rule do not apply to it.
        dims: list[int | None] = [batch_dim if isinstance(batch_dim, int) else 0]
    else:
        dims = _batch_dims(flat, batch_dim)
    size = _batch_size(flat, dims, chunks, empty)
    m = min(chunks, size)
    if m > 1 and not isinstance(input, Tensor):
        _check_lists(flat, size)

    # A tensor in several places with the same rule is also one tensor in each micro-batch.
    tensors = flat.tensors
    kind = flat.kind
    if len(tensors) > 1:
        keys = [*zip(map(id, tensors), dims)]
        tensors, kind = once(tensors, kind, keys)
        dims = [dim for _, dim in dict.fromkeys(keys)]

    sizes = sizes_of(size, m)
    shared = [k for k, dim in enumerate(dims) if dim is None]
    if m == 1:
        return [Chunk(tensors, kind)], sizes, shared
    # Views of the mini-batch, which share its memory and its version.
    parts: list[Sequence[Tensor]] = []
    for x, dim in zip(tensors, dims):
        if dim is None:
            parts.append([x] * m)
        else:
            parts.append(x.split(sizes, dim))
    return [Chunk(xs, kind) for xs in zip(*parts)], sizes, shared


def sizes_of(size: int, m: int) -> list[int]:
    """Return the sizes of ``m`` micro-batches. The first ones may have one sample more.

    >>> sizes_of(7, 3)
    [3, 2, 2]
    """
    return [size // m + (i < size % m) for i in range(m)]


def _batch_dims(
    flat: _FlatInput,
    rule: Any,
) -> list[int | None]:
    """Return the batch dimension of each tensor; ``None`` if all micro-batches share it."""
    dims: list[int | None] = []
    for leaf in flat.tensor_leaves():
        if leaf.shared or leaf.value.dim() == 0:
            dims.append(None)
            continue
        dim, _ = look_up(rule, flat.rule_path(leaf))
        dims.append(0 if dim is DEFAULT else dim)
    return dims


def _batch_size(
    flat: _FlatInput,
    dims: Sequence[int | None],
    chunks: int,
    empty: str,
) -> int:
    name = flat.name
    sizes: dict[int, int] = {}
    for k, (x, dim) in enumerate(zip(flat.tensors, dims)):
        if dim is None:
            continue
        is_strided = x.layout is torch.strided and not x.is_nested
        if not is_strided or not -x.dim() <= dim < x.dim():
            raise _not_cut(flat.name_of(k), x, dim)
        sizes[k] = x.shape[dim]
    if not sizes:
        raise ValueError(
            f'no tensor of the {name} has a batch dimension, so there is nothing to '
            f'split (shapes: {flat.shapes})'
        )

    if len({*sizes.values()}) > 1:
        lists = _lists_in(flat, Tensor)
        if chunks == 1 and lists:  # Nothing is split, so a list may have a tensor per sample.
            return max(map(len, lists.values()))
        raise _other_sizes(flat, sizes, lists)
    size = max(sizes.values())
    if size == 0:
        raise ValueError(
            'the batch is empty: the batch dimension of the input has size 0, at '
            f'least 1 is needed (shapes: {flat.shapes}); {empty}'
        )
    return size


def _other_sizes(
    flat: _FlatInput,
    sizes: Mapping[int, int],
    lists: Mapping[Path, object],
) -> ValueError:
    name = flat.name
    ways = (
        'Mark what all micro-batches share, like a table or position ids: NoChunk(tensor). Say '
        'where the batch is, if it is not dimension 0: GPipe(…, batch_dim=1)'
    )
    if lists:
        ways = _per_sample(next(iter(lists)), name)
    named_sizes = [f'{flat.name_of(k)}: {size}' for k, size in sizes.items()]
    return ValueError(
        f'the tensors of the {name} disagree in batch size: {", ".join(named_sizes)}; every one '
        f'must hold the same samples. {ways}'
    )


def _lists_in(
    flat: _FlatInput,
    type_of_items: type,
) -> dict[Path, list[Any]]:
    """Return the lists of a value whose items are split or plain, and all of a type."""
    lists: dict[Path, list[Any]] = {}
    for leaf in flat.leaves:
        path = leaf.path[:-1]
        if leaf.shared or not leaf.path or path in lists:
            continue
        items = item_at(flat.value, path)
        if type(items) is not list or len(items) < 2:
            continue
        if all(isinstance(item, type_of_items) for item in items):
            lists[path] = items
    return lists


def _check_lists(flat: _FlatInput, size: int) -> None:
    """Raise if a list has a plain value for each sample, because lists are not split."""
    name = flat.name
    for path, items in _lists_in(flat, Number).items():
        if len(items) == size:
            raise ValueError(
                f'{name}{path_name(path)} is a list of as many values as there are samples '
                f'({size}), and each micro-batch would get the whole list. '
                + _per_sample(path, name)
            )


def _per_sample(path: Path, name: str) -> str:
    return (
        f'If the list {name}{path_name(path)} has an item for each sample, pass a tensor '
        'whose dimension 0 is the batch, such as torch.tensor(list) or padded samples, or use '
        'chunks=1. If all micro-batches share the list, pass NoChunk(list)'
    )


def _not_cut(
    name: str,
    x: Tensor,
    dim: int,
) -> ValueError:
    if x.is_nested:
        reason = 'is a nested tensor'
        fix = 'pad it, or make it nested in the first layer'
    elif x.layout is not torch.strided:
        reason = f'is sparse ({x.layout})'
        fix = 'make it dense, or make it sparse in the first layer'
    elif x.dim() == 0:
        reason = 'has no dimensions'
        fix = 'give it a batch dimension'
    else:
        reason = f'has no dimension {dim} (its shape is {tuple(x.shape)})'
        fix = 'say where its batch is by batch_dim'
    return ValueError(
        f'{name} {reason}, so it cannot be split into micro-batches; {fix}, or '
        'mark it as the same for all micro-batches: NoChunk(tensor)'
    )


# Rules.

#: The entry of a rule for a path that it does not have.
DEFAULT = object()


def look_up(
    rule: Any,
    path: Iterable[Any],
) -> tuple[Any, bool]:
    """Return the entry of a rule for a path, and whether the rule has keys of this path."""
    named = False
    for key in path:
        if isinstance(rule, Mapping):
            rule = rule.get(key, DEFAULT)
        elif isinstance(rule, (list, tuple)):
            # A rule may have fewer entries than the value.
            rule = rule[key] if isinstance(key, int) and key < len(rule) else DEFAULT
        else:
            break
        named = True
    if isinstance(rule, _BY_KEYS):
        return DEFAULT, named
    return rule, named


def _entries(rule: Any) -> dict[Any, Any]:
    """Return the entries of a rule by keys or indices."""
    return dict(rule) if isinstance(rule, Mapping) else dict(enumerate(rule))


def _fit_rule(
    rule: Any,
    flat: _FlatInput,
    layers: Iterable[nn.Module],
) -> Any:
    """Convert the rule for the batch dimension to the keys of an input.

    Raises:
        ValueError: A key of the rule does not exist in the input.
    """
    value = flat.value
    paths = [flat.rule_path(leaf) for leaf in flat.leaves]
    if not isinstance(value, (Arguments, Tensor)):
        _check_used(rule, paths, 'the input')
        return rule
    arguments: list[Any] = [0]
    if isinstance(value, Arguments):
        arguments = [*range(len(value.args)), *value.kwargs]

    # An argument has a position and a name. The call uses one of them, and the rule any.
    names = _names_of_arguments(next(iter(layers)))
    aliases: dict[Any, Any] = {}
    for position, name in enumerate(names or ()):
        aliases[position] = name
        aliases[name] = position

    entries = _entries(rule)
    fitted = {}
    for argument in arguments:
        for key in (argument, aliases.get(argument)):
            if key is not None and key in entries:
                fitted[argument] = entries[key]
    if names is not None:
        _check_known(entries, {*aliases, *arguments}, 'the call')
    _check_used(fitted, paths, 'the call')
    return fitted.get(0, 0) if isinstance(value, Tensor) else fitted


def check_arguments(
    name: str,
    layer: nn.Module,
    input: Arguments,
) -> None:
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
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
    return list(parameters)


def _check_used(
    rule: Any,
    paths: Sequence[Path],
    where: str,
) -> None:
    """Check that each key of a rule exists in a value."""
    if not isinstance(rule, _BY_KEYS):
        return
    paths_within: dict[Any, list[Path]] = {}
    for path in paths:
        if path:
            paths_within.setdefault(path[0], []).append(path[1:])
    entries = _entries(rule)
    _check_known(entries, paths_within, where)
    for key, entry in entries.items():
        _check_used(entry, paths_within[key], where)


def _check_known(
    entries: Iterable[Any],
    keys: Container[Any],
    where: str,
) -> None:
    for entry in entries:
        if entry not in keys:
            raise ValueError(
                f'batch_dim says something of {entry!r}, but there is nothing of '
                f'that name or at that place in {where}; a rule goes by the keys of the '
                "input, or by the positions or names of the first layer's arguments"
            )


def check_rule(
    name: str,
    rule: Any,
    allowed: Sequence[Any],
    functions: bool = False,
) -> None:
    """Check that a rule consists of integers, allowed values and, optionally, functions.

    Raises:
        ValueError: It contains another value.
    """
    if isinstance(rule, _BY_KEYS):
        for entry in _entries(rule).values():
            check_rule(name, entry, allowed, functions)
        return
    # `True` would be taken for dimension 1.
    is_dimension = isinstance(rule, int) and not isinstance(rule, bool)
    if is_dimension or rule in allowed or (functions and callable(rule)):
        return
    words = ', '.join(map(repr, allowed))
    raise ValueError(
        f'{name} must be a dimension, one of {words}, or a dict or a sequence '
        f'of these by the keys of the value, but has {rule!r}'
    )


def value_of(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the single argument of a pipeline's call, or :class:`Arguments` for several."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and [*kwargs] == ['input']:  # the argument's name in `nn.Sequential.forward`
        return kwargs['input']
    return Arguments(*args, **kwargs)


# The output.

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
        # A tensor in two places of one output may be two tensors in another one.
        batches = list(map(_spread, batches))
    first = batches[0]
    for batch in batches:
        if len(batch.tensors) != len(first.tensors) or batch.kind != first.kind:
            raise _other_structures(batches)
    if not isinstance(batch_dim, int):
        batch_dim = 0
    # Without keys in the rule, only an error needs the paths.
    paths = _paths(first) if isinstance(rule, _BY_KEYS) else None

    gathered: dict[Any, Tensor] = {}
    output = []
    for k, xs in enumerate(zip(*[batch.tensors for batch in batches])):
        entry = batch_dim
        if rule is not None:
            path = paths[k] if paths else ()
            entry = _rule_of(rule, path, xs[0], batch_dim)
        # A tensor in several places of the output is gathered once, and stays one tensor.
        key = (*map(id, xs), entry)
        if key not in gathered:
            if shared and is_among(xs[0], shared):
                gathered[key] = xs[0]
            else:
                gathered[key] = _join(first, k, xs, sizes, entry)
        output.append(gathered[key])
    return first.kind(output)


def _paths(batch: Chunk) -> list[Path]:
    return [leaf.path for leaf in leaves_of(batch.value) if isinstance(leaf.value, Tensor)]


def _spread(batch: Chunk) -> Chunk:
    """Return a batch with a tensor for each place of the value."""
    kind = batch.kind
    if isinstance(kind, Repeated):
        return Chunk(kind.spread(batch.tensors), kind.kind)
    return batch


def _other_structures(batches: Sequence[Chunk]) -> ValueError:
    return ValueError(
        'the micro-batches came out of the pipeline with different numbers of '
        'tensors, or with other plain values or attributes: '
        f'{[len(batch.tensors) for batch in batches]} tensors, '
        f'{", ".join(map(_outline, batches))}'
    )


def _outline(batch: Chunk) -> str:
    """Format a value, with shapes in place of its tensors, and the attributes of these."""
    shapes: Any = [tuple(x.shape) for x in batch.tensors]
    outline = repr(batch.kind(shapes))
    if isinstance(batch.kind, Annotated):
        attributes = []
        for structures in batch.kind.attributes:
            if structures:
                attributes.append({name: value(()) for name, value in structures.items()})
        outline += f' with attributes {attributes}'
    return outline


def _rule_of(
    rule: Any,
    path: Path,
    x: Tensor,
    batch_dim: int,
) -> Any:
    """Return the dimension, reduction or function for a tensor of the output."""
    entry, named = look_up(rule, path)
    if entry is DEFAULT or entry is None:
        return batch_dim
    # A word for the whole output means its scalars. Other tensors have samples.
    if not isinstance(entry, int) and not named and x.dim() > 0:
        return batch_dim
    return entry


def _join(
    first: Chunk,
    k: int,
    xs: Sequence[Tensor],
    sizes: Sequence[int] | None,
    rule: Any,
) -> Tensor:
    """Gather tensor ``k`` of all micro-batches."""
    shapes = set()
    for i, x in enumerate(xs):
        shape = list(x.shape)
        if isinstance(rule, int):
            has_dim = -x.dim() <= rule < x.dim()
            # A single micro-batch is the mini-batch, so its output may have any size.
            expected = sizes[i] if sizes and len(xs) > 1 else None
            if not has_dim or expected not in (None, shape[rule]):
                raise _not_joined(i, x, sizes, rule, _name_of_output(first, k))
            del shape[rule]
        shapes.add(tuple(shape))
    if len(shapes) > 1:
        raise _mixed(xs, rule, _name_of_output(first, k))

    if isinstance(rule, int):
        if len(xs) == 1:
            return xs[0]
        return torch.cat(list(xs), rule)
    if callable(rule):
        return rule(xs)  # type: ignore[no-any-return]
    if rule in ('mean', MICRO_BATCH_MEAN):
        assert sizes is not None
        whole = sum(sizes)
        xs = [x * (size / whole) for x, size in zip(xs, sizes)]
    stacked = torch.stack(list(xs))
    return stacked if rule == 'stack' else stacked.sum(0)


def _name_of_output(batch: Chunk, k: int) -> str:
    return 'output' + path_name(_paths(batch)[k])


def _mixed(
    xs: Sequence[Tensor],
    rule: Any,
    name: str,
) -> ValueError:
    shapes = ', '.join(dict.fromkeys(str(tuple(x.shape)) for x in xs))
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


def _not_joined(
    i: int,
    x: Tensor,
    sizes: Sequence[int] | None,
    dim: int,
    name: str,
) -> ValueError:
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
