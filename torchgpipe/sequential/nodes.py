"""Nodes of a recorded graph: how they are computed, what they tell of a tensor, and in words."""
import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

__all__ = ['Constant', 'asks_for_grad', 'compute', 'is_about', 'is_in_place', 'is_plain', 'mapped',
           'words']

# What a tensor tells of itself that does not depend on its elements.
_ABOUT = frozenset((
    'size', 'shape', 'dim', 'ndim', 'ndimension', 'numel', 'nelement', 'stride', 'dtype', 'device',
    'layout', 'is_floating_point', 'is_complex', 'is_signed', 'is_cuda', 'is_cpu', 'is_meta',
    'is_sparse', 'is_nested', 'is_quantized', 'is_mkldnn', 'is_contiguous', 'element_size',
    'itemsize', 'nbytes', 'requires_grad', 'names', 'get_device', 'storage_offset', 'len',
    'result_type', 'promote_types'))


class Constant:
    """An object that a graph refers to by a name."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return self.name


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with what is in the arguments of a step."""
    if type(value) in (tuple, list):
        return type(value)(mapped(each, function) for each in value)
    if type(value) is dict:
        return {key: mapped(each, function) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(mapped(x, function) for x in (value.start, value.stop, value.step)))
    return function(value)


def compute(root: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if node.op == 'call_module':
        return root.get_submodule(target)(*args, **kwargs)
    if node.op == 'call_method':
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def is_about(node: fx.Node) -> bool:
    """Tell whether a node gives what does not depend on the elements of a tensor."""
    if node.target is getattr:
        return node.args[1] in _ABOUT
    return getattr(node.target, '__name__', node.target) in _ABOUT


def asks_for_grad(node: fx.Node) -> bool:
    """Tell whether a node asks a tensor for what depends on the graph that autograd makes."""
    return node.target is getattr and node.args[1] in ('requires_grad', 'is_leaf')


def is_in_place(node: fx.Node) -> bool:
    """Tell whether a node changes its first argument, by its name, where there is no sample."""
    name = str(node.target)
    return node.op == 'call_method' and name.endswith('_') and not name.endswith('__')


def is_plain(node: fx.Node) -> bool:
    """Tell whether a node gives no tensor, as far as is known without a sample."""
    inputs = node.all_input_nodes
    return node.op != 'placeholder' and (is_about(node) or (
        node.op == 'call_function' and bool(inputs)
        and getattr(node.target, '__module__', '') in ('_operator', 'math', 'builtins')
        and all(each.meta['kind'] == 'plain' for each in inputs)))


def words(node: fx.Node) -> str:
    """Say what a node gives, as the user has written it, more or less."""
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
    symbol = {'eq': '==', 'ne': '!=', 'lt': '<', 'le': '<=', 'gt': '>', 'ge': '>=', 'add': '+',
              'sub': '-', 'mul': '*', 'floordiv': '//', 'truediv': '/', 'mod': '%'}.get(name)
    if symbol and len(args) == 2:
        return f'{args[0]} {symbol} {args[1]}'
    return f'{name}({", ".join(args)})'
