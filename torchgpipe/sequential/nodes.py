"""Nodes of a graph: functions of a recording, their execution and their properties."""
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from torchgpipe.base.private import hooks_of, uncompiled
from torchgpipe.base.structure import Kind, Structure, flatten, storage_id

__all__ = ['Constant', 'apply', 'calls_in', 'compute', 'first_difference', 'form_of', 'guard',
           'guard_ways', 'gives_no_tensor', 'is_about', 'is_in_place', 'is_same', 'learning',
           'mapped', 'put_together', 'runs_python', 'same_constants', 'take_apart', 'words']


#: A method of Python or, from PyTorch 2.14 on, one of C++.
_apply: Any = vars(Function)['apply']


def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Apply a function that has a backward of its own, past an ``apply`` of its own."""
    return _apply.__get__(None, function)(*args, **kwargs)


def guard(found: Any, expected: Any, what: str, where: str) -> None:
    """See that what the way through the program depends on is as it was for the sample.

    Raises:
        ValueError: It is not.
    """
    if found is not expected and found != expected:
        raise _another_way(what, repr(expected), repr(found), where)


def _another_way(what: str, expected: str, found: str, where: str) -> ValueError:
    return ValueError(
        f'the program of a converted model goes the way that it went with the sample, for '
        f'which {what} was {expected}; it is {found} now ({where}). Convert the model '
        'with a sample for which it is the same, or let a submodule with that line be a leaf: '
        'to_sequential(model, sample, leaves=[…])')


def guard_ways(found: Sequence[Any], expected: Sequence[Any], others: Sequence[Any],
               sames: Sequence[bool], texts: Sequence[tuple[str, str]]) -> None:
    """See that it is as it was for the sample, or as for one sample where that does the same.

    Raises:
        ValueError: It is neither.
    """
    if not (found == others and all(sames)):
        for each in zip(found, expected, *zip(*texts)):
            guard(*each)


@uncompiled
def is_same(before: Any, after: Any) -> bool:
    """Return whether a step has given the tensor that it got, or all of it as it is."""
    if not all(isinstance(x, Tensor) and x.layout is torch.strided for x in (before, after)):
        return False
    one, other = ((x.shape, x.stride(), x.dtype, x.storage_offset(), storage_id(x),
                   x.requires_grad, x.is_conj(), x.is_neg()) for x in (before, after))
    return one == other


def take_apart(value: Any, expected: Any, where: str) -> tuple[Tensor, ...]:
    """Return the tensors of a value that is put together as it was for the sample."""
    try:
        tensors, kind = flatten(value)
    except TypeError as error:
        raise ValueError(f'{error}, at {where}') from None
    # Tuples of tensors alone all have one kind, whatever their number.
    if (kind, len(tensors)) != expected:
        raise _another_way('the form of a value', form_of(*expected),
                           form_of(kind, len(tensors)), where)
    return tensors


def form_of(kind: Kind, number: int) -> str:
    """Return what a value with some number of tensors looks like.

    >>> form_of(lambda tensors: {'x': tuple(tensors), 'n': 3}, 2)
    "{'x': (tensor, tensor), 'n': 3}"
    """
    texts: list[Any] = ['tensor'] * number
    return str(kind(texts)).replace("'tensor'", 'tensor')


def put_together(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Return a value of what is in it."""
    return structure(tensors)


class Constant:
    """An object that a graph refers to by a name."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return self.name


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the arguments of a step with a function of what is in them in its place."""
    if type(value) in (tuple, list):
        return type(value)([mapped(each, function) for each in value])
    if type(value) is dict:
        return {key: mapped(each, function) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(mapped(x, function) for x in (value.start, value.stop, value.step)))
    return function(value)


def compute(root: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a node gives for some arguments."""
    target: Any = node.target
    if node.op == 'call_module':
        return root.get_submodule(target)(*args, **kwargs)
    if node.op == 'call_method':
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def learning(x: Any) -> Any:
    """Return a tensor as a layer gets it in training, in the same memory; all else as it is."""
    learns = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    return x.detach().requires_grad_() if learns else x


def runs_python(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a node may run code of the user's, which may draw numbers of Python's."""
    if node.op == 'call_module':
        return any(not type(x).__module__.startswith('torch.nn.modules.')
                   or 'forward' in vars(x) or any(hooks_of(x))
                   for x in root.get_submodule(str(node.target)).modules())
    return node.target is apply


# What a tensor tells of itself that does not depend on its elements.
_ABOUT = frozenset((
    'size', 'shape', 'dim', 'ndim', 'ndimension', 'numel', 'nelement', 'stride', 'dtype', 'device',
    'layout', 'is_floating_point', 'is_complex', 'is_signed', 'is_cuda', 'is_cpu', 'is_meta',
    'is_sparse', 'is_nested', 'is_quantized', 'is_mkldnn', 'is_contiguous', 'element_size',
    'itemsize', 'nbytes', 'requires_grad', 'names', 'get_device', 'storage_offset', 'len',
    'result_type', 'promote_types'))


def is_about(node: fx.Node) -> bool:
    """Return whether a node gives what does not depend on the elements of a tensor."""
    if node.target is getattr:
        return node.args[1] in _ABOUT
    return getattr(node.target, '__name__', node.target) in _ABOUT


def is_in_place(node: fx.Node) -> bool:
    """Return whether a node changes its first argument, by its name, where there is no sample."""
    name = str(node.target)
    return node.op == 'call_method' and name.endswith('_') and not name.endswith('__')


def gives_no_tensor(node: fx.Node) -> bool:
    """Return whether a node gives no tensor, as far as is known without a sample."""
    inputs = node.all_input_nodes
    return node.op != 'placeholder' and (is_about(node) or (
        node.op == 'call_function' and bool(inputs)
        and getattr(node.target, '__module__', '') in ('_operator', 'math', 'builtins')
        and all(each.meta['kind'] == 'plain' for each in inputs)))


_SYMBOLS = {'eq': '==', 'ne': '!=', 'lt': '<', 'le': '<=', 'gt': '>', 'ge': '>=', 'add': '+',
            'sub': '-', 'mul': '*', 'floordiv': '//', 'truediv': '/', 'mod': '%'}


def words(node: fx.Node) -> str:
    """Return what a node gives, as the user has written it, more or less."""
    if node.op in ('get_attr', 'placeholder'):
        return str(node.target)
    if node.meta['kind'] == 'tensor':
        return node.name
    args = [words(a) if isinstance(a, fx.Node) else repr(a) for a in node.args]
    if node.target is getattr:
        return f'{args[0]}.{node.args[1]}'
    if node.target is operator.getitem and len(args) == 2:
        return f'{args[0]}[{args[1]}]'
    if node.op == 'call_method':
        return f'{args[0]}.{node.target}({", ".join(args[1:])})'
    name = getattr(node.target, '__name__', str(node.target))
    if name in _SYMBOLS and len(args) == 2:
        return f'{args[0]} {_SYMBOLS[name]} {args[1]}'
    return f'{name}({", ".join(args)})'


def calls_in(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes but for those that read an attribute, perhaps for nothing."""
    return [node for node in graph.nodes if node.op != 'get_attr']


def first_difference(graph: fx.Graph, constants: dict[str, Any], other: fx.Graph,
                     others: dict[str, Any]) -> int | None:
    """Return the number of calls before the first one that differs in two graphs, if one does.

    What they refer to by name is in ``constants`` and ``others``.
    """
    for k, (a, b) in enumerate(zip(calls_in(graph), calls_in(other))):
        if a.format_node() != b.format_node() or not all(map(
                same_constants, _constants_of(a, constants), _constants_of(b, others))):
            return k
    return None  # Each ends with its output, so neither goes on where the other one ends.


def _constants_of(node: fx.Node, constants: dict[str, Any]) -> list[Any]:
    found: list[str] = []
    call: Any = node.target, node.args, node.kwargs
    fx.node.map_aggregate(call, lambda x: found.append(str(x)))
    return [constants[name] for name in found if name in constants]


def same_constants(one: Any, other: Any) -> bool:
    """Return whether two things that graphs refer to by name are alike."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = [(x.shape, x.dtype, x.device) for x in (one, other)]
        return alike[0] == alike[1] and (one.is_meta or torch.equal(one, other))
    return bool(one == other)
