"""Traceable operations: they become nodes of a graph, with their execution and properties.

:class:`StepTracer` adds each operation to the graph, and computes it for the sample. The functions
of this module are steps of the tracer's own, such as :func:`guard`, or properties of nodes, such
as :func:`is_about`::

    y = f(x, {'scale': 2})      a value x, with a tensor for an example
        │
        ├─▶ graph               %y = call_function[f](%x, {'scale': 2})
        ├─▶ f(tensor, …)        which shows the type of y: a tensor, a number, or a structure
        ▼
    y                           a value, or a structure of values
"""

import gc
import operator
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from torchgpipe.base.devices import synchronize
from torchgpipe.base.private import hooks_of, uncompiled
from torchgpipe.base.structure import (
    PLAIN,
    Kind,
    Structure,
    flatten,
    flatten_nested,
    leaves_of,
    size_of,
    storage_id,
)
from torchgpipe.sequential.effects import (
    UNKNOWN,
    GeneratorStates,
    TracedValue,
    UnknownValue,
    has_values,
    held_beyond,
    ids_within,
    name_of_holder,
    release,
    without_grad,
)
from torchgpipe.sequential.refusals import NO_CACHE, OF_HOOKS, in_one_line, line_of

#: A method in Python or, from PyTorch 2.14 on, in C++.
_apply: Any = vars(Function)['apply']


def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Apply an autograd function by PyTorch's ``apply``, even if its class overrides it."""
    return _apply.__get__(None, function)(*args, **kwargs)


def guard(found: Any, expected: Any, what: str, where: str) -> None:
    """Check that a value that the program's path depends on is as for the sample.

    Raises:
        ValueError: The value differs.
    """
    if found is not expected and found != expected:
        raise _another_way(what, repr(expected), repr(found), where)


def _another_way(what: str, expected: str, found: str, where: str) -> ValueError:
    return ValueError(
        f'the program of a converted model goes the way that it went with the sample, for '
        f'which {what} was {expected}; it is {found} now ({where}). Convert the model '
        'with a sample for which it is the same, or let a submodule with that line be a leaf: '
        'to_sequential(model, sample, leaves=[…])'
    )


def guard_ways(
    found: Sequence[Any],
    expected: Sequence[Any],
    others: Sequence[Any],
    sames: Sequence[bool],
    texts: Sequence[tuple[str, str]],
) -> None:
    """Check that values are as for the sample, or as for one sample if that gives the same result.

    Raises:
        ValueError: The values are different from both.
    """
    if not (found == others and all(sames)):
        for each in zip(found, expected, *zip(*texts)):
            guard(*each)


@uncompiled
def is_same(before: Any, after: Any) -> bool:
    """Return whether the result of a step is its input, or an identical view of all of it."""
    if not all(isinstance(x, Tensor) and x.layout is torch.strided for x in (before, after)):
        return False
    one, other = (
        (
            x.shape,
            x.stride(),
            x.dtype,
            x.storage_offset(),
            storage_id(x),
            x.requires_grad,
            x.is_conj(),
            x.is_neg(),
        )
        for x in (before, after)
    )
    return one == other


def take_apart(value: Any, expected: Any, where: str) -> tuple[Tensor, ...]:
    """Return the tensors of a value, and check that its structure is as for the sample."""
    try:
        tensors, kind = flatten(value)
    except TypeError as error:
        raise ValueError(f'{error}, at {where}') from None
    # All tuples of only tensors have the same kind, regardless of their length.
    if (kind, len(tensors)) != expected:
        raise _another_way(
            'the form of a value', form_of(*expected), form_of(kind, len(tensors)), where
        )
    return tensors


def form_of(kind: Kind, number: int) -> str:
    """Return a value with a number of tensors as text.

    >>> form_of(lambda tensors: {'x': tuple(tensors), 'n': 3}, 2)
    "{'x': (tensor, tensor), 'n': 3}"
    """
    texts: list[Any] = ['tensor'] * number
    return str(kind(texts)).replace("'tensor'", 'tensor')


def put_together(structure: Structure, tensors: Sequence[Any]) -> Any:
    """Return a value from its structure and tensors."""
    return structure(tensors)


class Constant:
    """An object that a graph refers to by a name."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return self.name


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the arguments of a step, with a function applied to each element."""
    if type(value) in (tuple, list):
        return type(value)([mapped(each, function) for each in value])
    if type(value) is dict:
        return {key: mapped(each, function) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(mapped(x, function) for x in (value.start, value.stop, value.step)))
    return function(value)


def compute(root: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a node for some arguments."""
    target: Any = node.target
    if node.op == 'call_module':
        return root.get_submodule(target)(*args, **kwargs)
    if node.op == 'call_method':
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def learning(x: Any) -> Any:
    """Return a tensor that requires grad, in the same memory; return anything else unchanged."""
    learns = isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    return x.detach().requires_grad_() if learns else x


def runs_python(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a node may run the user's code, which may draw Python's random numbers."""
    if node.op == 'call_module':
        return any(
            not type(x).__module__.startswith('torch.nn.modules.')
            or 'forward' in vars(x)
            or any(hooks_of(x))
            for x in root.get_submodule(str(node.target)).modules()
        )
    return node.target is apply


# Properties of a tensor that do not depend on its elements.
_ABOUT = frozenset(
    (
        'size',
        'shape',
        'dim',
        'ndim',
        'ndimension',
        'numel',
        'nelement',
        'stride',
        'dtype',
        'device',
        'layout',
        'is_floating_point',
        'is_complex',
        'is_signed',
        'is_cuda',
        'is_cpu',
        'is_meta',
        'is_sparse',
        'is_nested',
        'is_quantized',
        'is_mkldnn',
        'is_contiguous',
        'element_size',
        'itemsize',
        'nbytes',
        'requires_grad',
        'names',
        'get_device',
        'storage_offset',
        'len',
        'result_type',
        'promote_types',
    )
)


def is_about(node: fx.Node) -> bool:
    """Return whether a node's result does not depend on the elements of a tensor."""
    if node.target is getattr:
        return node.args[1] in _ABOUT
    return getattr(node.target, '__name__', node.target) in _ABOUT


def is_in_place(node: fx.Node) -> bool:
    """Return whether a node changes its first argument, judged by its name without a sample."""
    name = str(node.target)
    return node.op == 'call_method' and name.endswith('_') and not name.endswith('__')


def gives_no_tensor(node: fx.Node) -> bool:
    """Return whether a node's result is not a tensor, as far as is known without a sample."""
    inputs = node.all_input_nodes
    return node.op != 'placeholder' and (
        is_about(node)
        or (
            node.op == 'call_function'
            and bool(inputs)
            and getattr(node.target, '__module__', '') in ('_operator', 'math', 'builtins')
            and all(each.meta['kind'] == 'plain' for each in inputs)
        )
    )


_SYMBOLS = {
    'eq': '==',
    'ne': '!=',
    'lt': '<',
    'le': '<=',
    'gt': '>',
    'ge': '>=',
    'add': '+',
    'sub': '-',
    'mul': '*',
    'floordiv': '//',
    'truediv': '/',
    'mod': '%',
}


def words(node: fx.Node) -> str:
    """Return the expression of a node, approximately as the user has written it."""
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
    """Return the nodes without reads of attributes, which may be unused."""
    return [node for node in graph.nodes if node.op != 'get_attr']


def first_difference(
    graph: fx.Graph, constants: dict[str, Any], other: fx.Graph, others: dict[str, Any]
) -> int | None:
    """Return the number of calls before the first one that differs in two graphs, if one does.

    ``constants`` and ``others`` have the constants of the graphs, by name.
    """
    for k, (a, b) in enumerate(zip(calls_in(graph), calls_in(other))):
        if a.format_node() != b.format_node() or not all(
            map(same_constants, _constants_of(a, constants), _constants_of(b, others))
        ):
            return k
    return None  # Both graphs end with their outputs, so they have the same length.


def _constants_of(node: fx.Node, constants: dict[str, Any]) -> list[Any]:
    found: list[str] = []
    call: Any = node.target, node.args, node.kwargs
    fx.node.map_aggregate(call, lambda x: found.append(str(x)))
    return [constants[name] for name in found if name in constants]


def same_constants(one: Any, other: Any) -> bool:
    """Return whether two constants of graphs are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = [(x.shape, x.dtype, x.device) for x in (one, other)]
        return alike[0] == alike[1] and (one.is_meta or torch.equal(one, other))
    return bool(one == other)


TValue = TypeVar('TValue', bound=UnknownValue)

#: Properties of a node whose result is neither a tensor nor a plain value.
_OBJECT = {'kind': 'object', 'bytes': 0, 'memory': None, 'device': False}


class StepTracer(fx.Tracer):
    """Adds steps to a graph.

    Attributes:
        graph: The recorded graph. In ``meta``, each node has its ``kind`` (``'tensor'``,
            ``'plain'`` or ``'object'``), ``bytes`` and ``memory``. It has whether it depends on
            the ``input``, and the nodes that it ``writes`` to. Computed nodes have ``seconds``.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.runs = self.over = False
        self.put_back: Callable[[], AbstractContextManager[None]] = nullcontext
        self.draws = GeneratorStates()
        self._tensors = {
            id(tensor): (name, tensor)
            for name, tensor in (*root.named_buffers(), *root.named_parameters())
        }
        self._devices = {tensor.device for _, tensor in self._tensors.values()}
        self._read: dict[str, Any] = {}
        self._values: list[weakref.ref[Any]] = []
        self._ids = {id(module) for module in root.modules()}

    def check_modes(self) -> None:
        """Check before each step that the forward has not changed modes."""
        raise NotImplementedError

    def refuse(self, why: str, hint: str = '') -> Any:
        """Raise an error that names the line."""
        raise NotImplementedError

    def placeholder(self, name: str, example: Any) -> Any:
        """Return a value for an input."""
        node = self.graph.placeholder(name)
        node.meta['input'] = True
        return self.wrap(node, example)

    def value_of(self, tensor: Tensor) -> Any:
        """Return the value in place of a parameter or a buffer, or another tensor unchanged."""
        if id(tensor) not in self._tensors:
            return tensor
        path, _ = self._tensors[id(tensor)]
        if path not in self._read:
            self._read[path] = self.wrap(self.graph.get_attr(path), tensor.detach())
        return self._read[path]

    def create_proxy(
        self, kind: Any, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any
    ) -> Any:
        """Record a step, and compute it for the sample."""
        if self.over:
            raise held_beyond()
        if not self.runs:
            self.refuse(
                'a layer computes with a value that it is not called with, as by '
                'torch.func.functional_call'
            )
        self.check_modes()
        if (
            target is torch._assert
            and args[0].node.meta['kind'] == 'plain'
            and (type(args[0]) is TracedValue)
        ):  # As for `assert`, the graph has no message.
            return torch._assert(bool(args[0]), *args[1:])
        args, kwargs = self.simple((tuple(args), dict(kwargs)))
        with self.put_back():
            node = self.graph.create_node(
                kind, target, mapped(args, self.create_arg), mapped(kwargs, self.create_arg)
            )
            node.meta['where'] = line_of()
            node.meta['input'] = any(each.meta['input'] for each in node.all_input_nodes)
            try:
                example = self._compute(node, args, kwargs)
            except Exception:
                self.graph.erase_node(node)
                raise
        return self.wrap(node, example)

    def _compute(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        values: list[Any] = []
        objects: list[Any] = []

        def example_of(x: Any) -> Any:
            if isinstance(x, fx.Proxy):
                values.append(x)
                return x._example if type(x) is TracedValue else UNKNOWN
            if type(x) is Constant:
                return x.value
            if not isinstance(x, (Tensor, nn.Module, *PLAIN)) and not callable(x):
                objects.append(x)
            return x

        args, kwargs = mapped((args, kwargs), example_of)
        if any(type(value) is not TracedValue for value in values):
            node.meta['writes'] = node.all_input_nodes[:1] if is_in_place(node) else []
            return UNKNOWN
        pythons = runs_python(self.root, node)
        self.draws.check(self.refuse, pythons)
        versions = [
            (x.node, x._example, x._example._version)
            for x in values
            if isinstance(x._example, Tensor)
        ]
        made_of = [ids_within(x) for x in objects]
        self.runs = False
        try:
            with self.draws.restored(pythons):
                found = self._called(node, args, kwargs)
        finally:
            self.runs = True
        for x, ids in zip(objects, made_of):
            if ids_within(x) != ids:
                self.refuse(
                    f'it passes an object ({type(x).__name__}) that is changed there, '
                    'and each run would pass the same one',
                    NO_CACHE,
                )
        node.meta['writes'] = [each for each, x, old in versions if x._version != old]
        return found

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        def run(learns: bool) -> Any:
            given = mapped((args, kwargs), learning) if learns else (args, kwargs)
            return compute(self.root, node, *given)

        synchronize(self._devices)
        start = perf_counter()
        if node.op == 'call_module':  # A module may use gradients.
            found = without_grad(run)
        else:
            with torch.no_grad():
                found = run(False)
        synchronize(self._devices)
        node.meta['seconds'] = perf_counter() - start
        return found

    def wrap(self, node: fx.Node, example: Any) -> Any:
        """Return a value for the result of a node, or a structure of values."""
        meta = node.meta
        inputs = node.all_input_nodes
        meta.update(_OBJECT, data=False, mode=False, grad=False)
        for name, default in (('input', False), ('where', ''), ('writes', [])):
            meta.setdefault(name, default)
        if isinstance(example, Tensor):
            example = example.detach() if example.requires_grad else example
            meta['kind'] = 'tensor'
            meta['bytes'] = size_of(example)
            meta['memory'] = storage_id(example) if example.layout is torch.strided else None
        elif example is UNKNOWN:
            meta['kind'], meta['bytes'] = ('plain', 0) if gives_no_tensor(node) else ('tensor', 1)
            meta['device'] = node.target is getattr and node.args[1] == 'device'
            return self._noted(UnknownValue(node, self))
        elif example is None:
            if node.op == 'call_module':
                self.add_guard(node, None, 'the result of a layer')
            return None
        elif not isinstance(example, PLAIN):
            return self._taken_apart(node, example)
        else:
            meta['kind'] = 'plain'
            meta['device'] = isinstance(example, torch.device)
            meta['mode'] = node.op == 'get_attr' or any(each.meta['mode'] for each in inputs)
            meta['grad'] = any(each.meta['grad'] for each in inputs) or (
                node.target is getattr and node.args[1] in ('requires_grad', 'is_leaf')
            )
            meta['data'] = any(each.meta['data'] for each in inputs) or (
                any(each.meta['kind'] != 'plain' for each in inputs) and not is_about(node)
            )
        return self._noted(TracedValue(node, self, example))

    def _taken_apart(self, node: fx.Node, example: Any) -> Any:
        try:
            if node.target is put_together:
                raise TypeError('it was put together for a step, and goes there as it is')
            tensors, kind = flatten(example)
        except TypeError:
            return self._noted(TracedValue(node, self, example))
        expected = self._constant((kind, len(tensors)))
        parts = self.add_step(take_apart, node, expected, in_one_line(node.meta['where']))
        return kind(
            [
                self.wrap(self.add_step(operator.getitem, parts, k), tensor)
                for k, tensor in enumerate(tensors)
            ]
        )

    def _noted(self, value: TValue) -> TValue:
        self._values.append(weakref.ref(value))
        return value

    def end(self) -> None:
        """Check that no object holds a value any more.

        Raises:
            ConversionError: An object holds a value.
        """
        self._read.clear()
        if self._values_left():
            gc.collect()
            left = self._values_left()
            if left:
                raise held_beyond(name_of_holder(left))

    def release(self) -> None:
        """Remove values from all objects that hold them, even after an error."""
        self._read.clear()
        release(self._values_left())

    def _values_left(self) -> list[Any]:
        values = [reference() for reference in self._values]
        return [value for value in values if value is not None]

    def add_step(self, function: Callable[..., Any], node: fx.Node, *args: Any) -> fx.Node:
        """Add a step of the tracer's own."""
        step = self.graph.call_function(function, (node, *args))
        step.meta.update({**node.meta, **_OBJECT, 'writes': []})
        return step

    def add_guard(self, node: fx.Node, expected: Any, what: str, hint: str = '') -> None:
        """Add a step that checks that the result of a node is as for the sample."""
        self.add_step(guard, node, self.simple(expected), what, in_one_line(line_of()) + hint)

    def _constant(self, value: Any) -> Constant:
        name = f'_constant_{len(self.constants)}'
        self.constants[name] = value
        return Constant(name, value)

    def create_arg(self, a: Any) -> Any:
        """Return the graph's representation of a value."""
        if isinstance(a, fx.Proxy):
            return a.node
        if type(a) in (Constant, bool, float, int, str, type(None)):
            return a
        if isinstance(a, Tensor):
            if id(a) not in self._tensors:
                if a.requires_grad:
                    self.refuse('it uses a tensor with a gradient that is no parameter of it')
                self._tensors[id(a)] = self._constant(a.detach()).name, a
            return self.value_of(a).node
        if isinstance(a, torch.Generator):
            self.refuse('it draws random numbers from a torch.Generator')
        try:
            if not is_dataclass(a):  # A dataclass has no value in it here.
                return super().create_arg(a)
        except NotImplementedError:
            pass
        if not self._ids.isdisjoint(ids_within(a)):
            self.refuse(
                f'it passes an object ({type(a).__name__}) that has a part of the model in it'
            )
        return self._constant(a)

    def simple(self, value: Any) -> Any:
        """Return a value in types that a graph supports, with steps that build other types."""
        return mapped(value, self._put_together)

    def _put_together(self, value: Any) -> Any:
        if isinstance(value, (fx.Proxy, Constant, Tensor, nn.Module, *PLAIN)):
            return value
        try:
            values, structure = flatten_nested(value, marks=False, takes=fx.Proxy)
        except TypeError:
            if has_values(value) and self._ids.isdisjoint(ids_within(value)):
                has_others = any(issubclass(type(x.value), Tensor) for x in leaves_of(value))
                self.refuse(
                    f'it passes an object ({type(value).__name__}) with tensors in it',
                    OF_HOOKS if has_others else NO_CACHE,
                )
            return value
        return self.create_proxy(
            'call_function', put_together, (self._constant(structure), list(values)), {}
        )
