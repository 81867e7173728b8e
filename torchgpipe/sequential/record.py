"""Record a forward: the graph of what a module computes, made by running it once.

Each step is recorded, and computed for the sample, so that a program can go its way: whether a
mask is there, how many parts a tensor was cut into. See :mod:`torchgpipe.sequential.value` for
what becomes of numbers, and :mod:`torchgpipe.sequential.patches` for how steps are seen.

[Note: What a recording may depend on]
The way of a program may depend on what is the same for each micro-batch. What it depends on is
checked in each run. It may not depend on the elements of tensors, nor on whether the model is in
training, nor on random numbers of Python's. It does what it does under one grad mode and autocast.
A submodule that depends on training or changes modes stays whole: as soon as one is found, its
class is added to the leaves, and the recording starts again. In all other
cases there is an error, so that nobody is surprised by how much stays whole.
Where a program goes by the training mode, it is recorded in the other mode, too: if it makes no
difference, nothing has to stay whole.
"""
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from torchgpipe.engine.checkpoint.attributes import attributes_of, contents_of
from torchgpipe.engine.memory import size_of
from torchgpipe.private import storage_id
from torchgpipe.sequential.draws import KeptDraws
from torchgpipe.sequential.contents import ids_within
from torchgpipe.sequential.errors import NeedsLeaf, is_of_torch, line_of, refused
from torchgpipe.sequential.leaves import Leaves, modules_within
from torchgpipe.sequential.patches import watched
from torchgpipe.sequential.runtime import expect, put_together, take_apart
from torchgpipe.sequential.value import UNKNOWN, Unknown, Value
from torchgpipe.structure import PLAIN, flatten, flatten_nested

__all__ = ['Constant', 'Recorder']

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


class ModeTaken(NamedTuple):
    """A place where a program goes by the training mode.

    Attributes:
        place: How many steps were there.
        module: The innermost submodule, in a list; none for the model itself.
        line: The line.
    """

    place: int
    module: list[nn.Module]
    line: str


class Recorder(fx.Tracer):
    """Record one forward.

    Args:
        root: The module, a copy, as its layers run and it may be changed.
        leaves: Which modules in it stay whole.

    Attributes:
        graph: What was recorded. In ``meta``, each node has its ``kind`` (``'tensor'``,
            ``'plain'`` or ``'object'``), its ``bytes`` and ``memory``, whether it depends on the
            ``input``, and what it ``writes`` to.
        constants: What it refers to by name.
        modes_taken: Where its program goes by the training mode.
        inner: The innermost submodule that has raised an error, if one has.
    """

    def __init__(self, root: nn.Module, leaves: Leaves) -> None:
        super().__init__()
        self.root = root
        self.leaves = leaves
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.modes_taken: list[ModeTaken] = []
        self.inner: str | None = None
        self._paths = {module: name for name, module in root.named_modules()}
        self._looked_into = list(modules_within(root, leaves))
        self._tensors = {id(tensor): (name, tensor) for name, tensor in
                         (*root.named_buffers(), *root.named_parameters())}
        self._read: dict[str, Any] = {}
        self._taken: set[tuple[fx.Node, str]] = set()
        self._stack: list[nn.Module] = []
        self._runs = False
        self._draws = KeptDraws()
        self._modes = _modes()

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the forward with values, and record it up to what it returns."""
        before = [_contents(module) for module in self._looked_into]
        with self._training_as_values(), watched(self):
            self._runs = True
            try:
                result = self.create_arg(self._simple(self.root.forward(*args, **kwargs)))
                self._check_modes()
            finally:
                self._runs = False
        for module, old in zip(self._looked_into, before):
            self._check_contents(module, old)
        self.graph.output(result)

    def placeholder(self, name: str, known: Any) -> Any:
        """Give a value for an input."""
        node = self.graph.placeholder(name)
        node.meta['input'] = True
        return self._wrap(node, known)

    # --- what a forward does
    # -------------------------------------------------------------------------------------

    @property
    def watches(self) -> bool:
        """Whether the forward runs now, and not a leaf."""
        return self._runs

    def called(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> Any:
        """Record the call of a leaf; look into another module."""
        if module not in self._paths:
            if next(module.parameters(), None) is not None:
                self.refuse(f'it calls a {type(module).__name__} with parameters, which is not a '
                            'submodule of it')
            return run(module, *args, **kwargs)
        if module in self.leaves:
            return self.create_proxy('call_module', self._paths[module], args, kwargs)
        self._stack.append(module)
        try:
            return run(module, *args, **kwargs)
        except Exception:
            self.inner = self.inner or self._paths[module]
            raise
        finally:
            self._stack.pop()

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Give a value for a parameter or a buffer."""
        return self._value_of(found) if isinstance(found, Tensor) else found

    def listed(self, module: nn.Module, name: str, tensor: Tensor) -> Any:
        """Give a value for a parameter or a buffer."""
        return self._value_of(tensor)

    def written(self, module: nn.Module, name: str) -> None:
        """Refuse it: each micro-batch would do so, on another device perhaps."""
        if module in self._paths:
            self.refuse(f"it sets the attribute '{name}' of a module, which each micro-batch "
                        'would do again')

    def drew(self) -> None:
        """Refuse it: the graph would have the one number that was drawn now."""
        self.refuse('it draws random numbers of Python\'s')

    def made(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
             ) -> Any:
        """Record a call that PyTorch would not take values for."""
        return self.create_proxy('call_function', function, args, kwargs)

    def _value_of(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._tensors:
            return tensor
        path, _ = self._tensors[id(tensor)]
        if path not in self._read:
            self._read[path] = self._wrap(self.graph.get_attr(path), tensor.detach())
        return self._read[path]

    # --- steps
    # -------------------------------------------------------------------------------------

    def create_proxy(self, kind: Any, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any
                     ) -> Any:
        """Record a step, and compute it for the sample."""
        self._check_modes()
        args = tuple(map(self._simple, args))
        kwargs = {name: self._simple(value) for name, value in kwargs.items()}
        node = self.graph.create_node(kind, target, self.create_arg(args),
                                      self.create_arg(kwargs))
        node.meta['where'] = line_of()
        node.meta['input'] = any(each.meta['input'] for each in node.all_input_nodes)
        return self._wrap(node, self._compute(node, args, kwargs))

    def _compute(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        values: list[Any] = []
        objects: list[Any] = []

        def known_of(x: Any) -> Any:
            if isinstance(x, fx.Proxy):
                values.append(x)
                return x._known if type(x) is Value else UNKNOWN
            if type(x) is Constant:
                return x.value
            if not isinstance(x, (Tensor, nn.Module, *PLAIN)) and not callable(x):
                objects.append(x)
            return x

        args, kwargs = _mapped((args, kwargs), known_of)
        if any(type(value) is not Value for value in values):
            return UNKNOWN
        before = [(x.node, x._known, x._known._version) for x in values
                  if isinstance(x._known, Tensor)]
        made_of = [ids_within(x) for x in objects]
        self._runs = False
        try:
            with self._draws.kept(), torch.no_grad():
                found = _run(self.root, node, args, kwargs)
        finally:
            self._runs = True
        for x, ids in zip(objects, made_of):
            if ids_within(x) != ids:
                self.refuse(f'it hands on an object ({type(x).__name__}) that is changed there, '
                            'and each run would hand on the same one')
        node.meta['writes'] = [each for each, x, old in before if x._version != old]
        return found

    def _wrap(self, node: fx.Node, known: Any) -> Any:
        """Give a value for what a node gives, or a structure of values."""
        meta = node.meta
        meta.update(data=False, mode=False, kind='object', bytes=0, memory=None)
        meta['input'], meta['where'] = meta.get('input', False), meta.get('where', '')
        meta.setdefault('writes', [])
        inputs = node.all_input_nodes
        if isinstance(known, Tensor):
            meta['kind'], meta['bytes'] = 'tensor', size_of(known)
            meta['memory'] = storage_id(known) if known.layout is torch.strided else None
            return Value(node, self, known)
        if known is UNKNOWN:
            meta['kind'], meta['bytes'] = ('plain', 0) if _is_plain(node) else ('tensor', 1)
            return Unknown(node, self)
        if known is None:
            if node.op == 'call_module':
                self._expect(node, None, 'the result of a layer')
            return None
        if not isinstance(known, PLAIN):
            return self._taken_apart(node, known)
        meta['kind'] = 'plain'
        meta['mode'] = node.op == 'get_attr' or any(each.meta['mode'] for each in inputs)
        meta['data'] = any(each.meta['data'] for each in inputs) or (
            any(each.meta['kind'] != 'plain' for each in inputs) and not _is_about(node))
        return Value(node, self, known)

    def _taken_apart(self, node: fx.Node, known: Any) -> Any:
        if node.target is put_together:
            return Value(node, self, known)
        try:
            tensors, kind = flatten(known)
        except TypeError:
            return Value(node, self, known)
        expected = self._constant((kind, len(tensors)))
        taken = self._step(take_apart, node, expected, node.meta['where'])
        values = []
        for k, tensor in enumerate(tensors):
            item = self._step(operator.getitem, taken, k)
            values.append(self._wrap(item, tensor))
        return kind(values)

    def _step(self, function: Callable[..., Any], node: fx.Node, *args: Any) -> fx.Node:
        """Add a step of the recorder's own."""
        step = self.graph.call_function(function, (node, *args))
        step.meta.update({**node.meta, 'kind': 'object', 'bytes': 0, 'writes': [], 'memory': None})
        return step

    def _constant(self, value: Any) -> Constant:
        name = f'_constant_{len(self.constants)}'
        self.constants[name] = value
        return Constant(name, value)

    def create_arg(self, a: Any) -> Any:
        """Give what stands for a value in the graph."""
        if type(a) is Constant:
            return a
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, Tensor):
            if id(a) not in self._tensors:
                self._tensors[id(a)] = self._constant(a.detach()).name, a
            return self._value_of(a).node
        try:
            if is_dataclass(a):  # without a value in it
                return self._constant(a)
            return super().create_arg(a)
        except NotImplementedError:
            if isinstance(a, nn.Module):
                raise
            return self._constant(a)

    def _simple(self, value: Any) -> Any:
        """Let a step put together what a graph has no form for, such as a dataclass with values.
        """
        if isinstance(value, fx.Proxy) or type(value) is Constant:
            return value
        if type(value) in (tuple, list):
            return type(value)(map(self._simple, value))
        if type(value) is dict:
            return {key: self._simple(each) for key, each in value.items()}
        if type(value) in (slice, range) or isinstance(value, (Tensor, nn.Module, *PLAIN)):
            return value
        try:
            values, structure = flatten_nested(value, marks=False, takes=fx.Proxy)
        except TypeError:
            return value
        return self.create_proxy('call_function', put_together,
                                 (self._constant(structure), list(values)), {})

    # --- what a program depends on: [Note: What a recording may depend on]
    # -------------------------------------------------------------------------------------

    def take(self, value: Any, how: Callable[[Any], Any]) -> Any:
        """Give the number or the truth that a program goes its way by, and let it be checked."""
        node, known = value.node, value._known
        if (isinstance(known, Tensor) and how is not len) or node.meta['data']:
            self.refuse('its program goes by the elements of a tensor')
        result = how(known)
        if node.meta['mode']:
            self.modes_taken.append(ModeTaken(len(self._steps()), self._stack[-1:], line_of()))
        elif node.meta['input'] and (node, how.__name__) not in self._taken:
            self._taken.add((node, how.__name__))
            what = _words(node)
            if how in (len, bool) and result is not known:
                node, known, what = self._step(how, node), result, f'{how.__name__}({what})'
            self._expect(node, known, what)
        return result

    def _expect(self, node: fx.Node, expected: Any, what: str) -> None:
        where = ' '.join(line_of().split())
        self._step(expect, node, self._simple(expected), what, where)

    def to_bool(self, obj: Any) -> Any:
        """Refuse to tell whether something unknown is true."""
        self._refuse_unknown(f'its program goes by {_words(obj.node)}')

    def iter(self, obj: Any) -> Any:
        """Refuse to go through something unknown."""
        self._refuse_unknown(f'its program goes through {_words(obj.node)}')

    def is_a(self, value: Any, classes: Any) -> bool:
        """Answer ``isinstance``; without a sample, to PyTorch itself a value is a value."""
        if type(value) is Value:
            return isinstance(value._known, classes)
        if not is_of_torch(sys._getframe(2)):
            self._refuse_unknown('its program asks for the type of a value')
        return False

    def is_tensor(self, value: Any) -> bool:
        """Tell whether a value is a tensor, as far as is known."""
        return bool(value.node.meta['kind'] == 'tensor')

    def _check_modes(self) -> None:
        if _modes() != self._modes:
            self._stay_whole('it changes grad mode, inference mode or autocast for a part of it')
        moved = self._draws.moved()
        if moved:
            self.refuse(f'it draws random numbers of {moved}, here or before')

    def check_mode(self, other: 'Recorder') -> None:
        """See that a recording in another training mode is the same.

        Raises:
            NeedsLeaf: It is not, by the doing of a submodule.
            ConversionError: It is not, by that of the model itself.
        """
        steps, others_steps = self._steps(), other._steps()
        pairs = zip(steps, others_steps)
        first = next((k for k, (mine, others) in enumerate(pairs)
                      if mine.format_node() != others.format_node()
                      or not all(map(_same, self._constants_of(mine),
                                     other._constants_of(others)))), None)
        if first is None and len(steps) == len(others_steps):
            return
        before = [each for each in self.modes_taken if first is None or each.place <= first]
        last = (before or self.modes_taken)[-1]
        if last.module:
            raise NeedsLeaf(type(last.module[0]))
        raise self._refused('its program goes by the training mode', None, line=last.line)

    def _steps(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op != 'get_attr']

    def _constants_of(self, node: fx.Node) -> list[Any]:
        return [self.constants[str(a)] for a in (node.target, *node.args)
                if str(a) in self.constants]

    def _stay_whole(self, why: str) -> None:
        if self._stack:
            raise NeedsLeaf(type(self._stack[-1]))
        self.refuse(why)

    def _refuse_unknown(self, why: str) -> Any:
        self.refuse(why + ', which is not known without a sample',
                    'give one: to_sequential(model, sample)')

    def refuse(self, why: str, hint: str = '') -> Any:
        """Raise an error that names the line and the submodule."""
        raise self._refused(why, self._paths[self._stack[-1]] if self._stack else None, hint)

    def _refused(self, why: str, inner: str | None, hint: str = '', line: str = '') -> Exception:
        return refused(self.root, why, line or line_of(), inner, hint)

    # --- what modules are made of
    # -------------------------------------------------------------------------------------

    @contextmanager
    def _training_as_values(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self._looked_into]
        for module, mode in modes:
            path = self._paths[module]
            node = self.graph.get_attr(f'{path}.training' if path else 'training')
            module.__dict__['training'] = self._wrap(node, mode)
        try:
            yield
        finally:
            for module, mode in modes:
                module.__dict__['training'] = mode

    def _check_contents(self, module: nn.Module, before: dict[str, list[Any]]) -> None:
        for name, now in _contents(module).items():
            old = before.get(name, [])
            if len(now) != len(old) or any(a is not b for a, b in zip(now, old)):
                path = self._paths[module]
                raise self._refused(f"it changes what is in the attribute '{name}' of a module, "
                                    'which each micro-batch would do again', path or None,
                                    line='  (a list, a dict or the like)')


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with what is in the arguments of a step."""
    if type(value) in (tuple, list):
        return type(value)(_mapped(each, function) for each in value)
    if type(value) is dict:
        return {key: _mapped(each, function) for key, each in value.items()}
    if type(value) is slice:
        return slice(*(_mapped(x, function) for x in (value.start, value.stop, value.step)))
    return function(value)


def _contents(module: nn.Module) -> dict[str, list[Any]]:
    found = {name: contents_of(name, value) for name, value in attributes_of(module).items()}
    return {name: contents for name, contents in found.items() if contents is not None}


def _run(root: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if node.op == 'call_module':
        return root.get_submodule(target)(*args, **kwargs)
    if node.op == 'call_method':
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def _modes() -> tuple[Any, ...]:
    """Give the modes that a part of a forward may be in, and a layer would not be."""
    kinds = {'cpu', *([str(torch.accelerator.current_accelerator())]
                      if torch.accelerator.is_available() else [])}
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds))


def _is_about(node: fx.Node) -> bool:
    """Tell whether a node gives what does not depend on the elements of a tensor."""
    if node.target is getattr:
        return node.args[1] in _ABOUT
    return getattr(node.target, '__name__', node.target) in _ABOUT


def _is_plain(node: fx.Node) -> bool:
    """Tell whether a node gives no tensor, as far as is known without a sample."""
    inputs = node.all_input_nodes
    return node.op != 'placeholder' and (_is_about(node) or (
        node.op == 'call_function' and bool(inputs)
        and getattr(node.target, '__module__', '') in ('_operator', 'math', 'builtins')
        and all(each.meta['kind'] == 'plain' for each in inputs)))


def _words(node: fx.Node) -> str:
    """Say what a node gives, as the user has written it, more or less."""
    if node.op in ('get_attr', 'placeholder'):
        return str(node.target)
    if node.meta['kind'] == 'tensor':
        return node.name
    args = [_words(a) if isinstance(a, fx.Node) else repr(a) for a in node.args]
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
