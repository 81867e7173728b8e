"""A layer of a converted model: a part of its program with the submodules that it calls.

:func:`build` makes a :class:`Layer` for each list of steps, with its program as :class:`Code`. The
:class:`FirstLayer` is called with the arguments of the original's forward, and :class:`Inputs`
extracts their tensors.

[Note: Names of a converted model]
A layer holds submodules, parameters and buffers under their names in the model. So a name in the
sequential module is the number of a layer and a name in the model. A module, a parameter or a
buffer that several layers use is in each of them::

    model         conv1.weight      blocks.0.norm.weight
    sequential    0.conv1.weight    3.blocks.0.norm.weight
"""

import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import Tensor, fx, nn

from torchgpipe.base.private import uncompiled
from torchgpipe.base.structure import Arguments, Structure, flatten_nested
from torchgpipe.divisors import defaults_of
from torchgpipe.losses import watches
from torchgpipe.sequential.cuts import Route, by_use, routes
from torchgpipe.sequential.operations import Constant, form_of
from torchgpipe.sequential.parts import (
    Converted,
    NamedLayer,
    all_names,
    converted,
    put,
    with_all_names,
)
from torchgpipe.skip.transfer import Key, Namespace, current_skip_tracker


class Code:
    """A function that was made from a graph: its source, and the objects that it refers to.

    It may contain a loss.
    """

    def __init__(
        self, source: str, names: dict[str, Any], title: str, has_loss: bool = False
    ) -> None:
        self.source = source
        self._names = names
        self._title = title
        self._has_loss = has_loss
        scope = dict(names)
        exec(compile(source, title, 'exec'), scope)
        self.function: Callable[..., Any] = (
            watches(scope['forward']) if has_loss else scope['forward']
        )
        # Tracebacks show the source.
        linecache.cache[title] = len(source), None, source.splitlines(True), title

    def __deepcopy__(self, memo: dict[int, Any]) -> 'Code':
        return self

    def __reduce__(self) -> Any:
        modules = {
            name: value.__name__
            for name, value in self._names.items()
            if isinstance(value, ModuleType)
        }
        names = {
            name: value
            for name, value in self._names.items()
            if name != '__builtins__' and name not in modules
        }
        return _code, (self.source, names, modules, self._title, self._has_loss)


def _code(
    source: str, names: dict[str, Any], modules: dict[str, str], title: str, has_loss: bool = False
) -> Code:
    found = {name: import_module(module) for name, module in modules.items()}
    return Code(source, {**names, **found}, title, has_loss)


class Inputs:
    """Extracts the tensors from arguments, in the same way as from the sample."""

    def __init__(
        self,
        signature: inspect.Signature,
        names: Sequence[str] = (),
        structure: Structure | None = None,
        number: int = 0,
    ) -> None:
        self.signature = signature
        self._names = tuple(names)
        self._structure = structure
        self._number = number

    def __deepcopy__(self, memo: dict[int, Any]) -> 'Inputs':
        return self

    @uncompiled
    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Return the tensors.

        Raises:
            TypeError: The original's forward does not take these arguments.
            ValueError: The sample had other arguments. The program may differ for these.
        """
        found = arguments_of(self.signature, args, kwargs)
        if self._structure is None:
            if found.keys() != {*self._names}:
                raise ValueError(
                    f'the model was converted without a sample, for {list(self._names)}, but is '
                    f'called with {list(found)}; convert it with a sample that has them: '
                    'to_sequential(model, Arguments(…))'
                )
            return [found[name] for name in self._names]
        tensors, structure = flatten_nested(found)
        if len(tensors) != self._number or structure != self._structure:
            raise self._unlike(structure, len(tensors))
        return tensors

    def _unlike(self, found: Structure, number_found: int) -> ValueError:
        assert self._structure is not None
        structure = self._structure
        number = self._number
        place: list[Any] = ['tensor']
        expected = structure(place * number)
        now = found(place * number_found)
        texts = form_of(structure, number), form_of(found, number_found)
        way = self._way(self._named(expected), self._named(now))
        if expected == now and sorted(texts[0]) == sorted(texts[1]):  # Dicts are, in any order.
            way = 'give the keys in the order of the sample, by which a program may go'
        return ValueError(
            'a converted model is called with arguments like those of the sample, which were '
            f'{texts[0]}, but these are {texts[1]}; {way}'
        )

    def _named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by their names in a call, including the ones in ``**kwargs``."""
        found = dict(arguments)
        for name, each in self.signature.parameters.items():
            if each.kind is each.VAR_KEYWORD:
                found |= found.pop(name, {})
        return found

    @staticmethod
    def _way(expected: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        """Return the fix for a call with other arguments than the sample, by their names."""
        if any(
            isinstance(x, Mapping)
            and not isinstance(expected.get(name), Mapping)
            and expected.keys() & x.keys()
            for name, x in now.items()
        ):
            return (
                'pass the dict as keyword arguments: model(**batch), or Arguments(**batch) '
                'where one value is expected'
            )
        ways = []
        if added := [name for name in now if name not in expected]:
            ways.append(
                f'the sample was without {", ".join(map(repr, added))}: leave it out, or '
                'convert the model with it, to_sequential(model, Arguments(…, '
                f'{", ".join(f"{name}=…" for name in added)}))'
            )
        if missing := [name for name in expected if name not in now]:
            ways.append(
                f'this call is without {", ".join(map(repr, missing))}: give it, or '
                'convert the model without it'
            )
        return '; '.join(ways) or 'convert it with a sample like these'


def arguments_of(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments by the names of parameters, without defaults."""
    bound = signature.bind(*args, **kwargs).arguments
    parameters = signature.parameters
    return {name: value for name, value in bound.items() if value is not parameters[name].default}


def called_with(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a sample."""
    if type(sample) is Arguments:
        return sample.args, sample.kwargs
    return (sample,), {}


class Layer(NamedLayer):
    """Run a part of a program.

    Args:
        code: A function of this module, the values from the previous layer, and popped skips. It
            returns the output of the layer, and the skips to stash.
    """

    def __init__(
        self,
        code: Code,
        number: int,
        pops: Sequence[str],
        stashes: Sequence[str],
        namespace: Namespace,
    ) -> None:
        super().__init__()
        self._code = code
        self._number = number
        self._pops: list[Key] = [(namespace, name) for name in pops]
        self._stashes: list[Key] = [(namespace, name) for name in stashes]

    def stashable(self) -> Iterator[Key]:
        """Yield the skips that the layer stashes."""
        return iter(self._stashes)

    def poppable(self) -> Iterator[Key]:
        """Yield the skips that the layer pops."""
        return iter(self._pops)

    def forward(self, value: Any) -> Any:
        """Compute the output from the values of the previous layer."""
        return self._code.function(self, *((value,) if self._number == 1 else value))[0]

    @property
    def code(self) -> str:
        """The source of its program; ``self.blocks[0]`` is the submodule ``blocks.0``."""
        return re.sub(
            r'\._(?:modules|parameters|buffers)\["(\w+)"\]',
            lambda found: f'.{found[1]}' if found[1].isidentifier() else f'[{found[1]}]',
            self._code.source,
        )

    def extra_repr(self) -> str:
        """Return the names of the skips that it pops and stashes, as text."""
        lines = []
        for verb, keys in (('pops', self._pops), ('stashes', self._stashes)):
            if keys:
                names = ', '.join(name for _, name in keys)
                lines.append(f'{verb} {names}')
        return '\n'.join(lines)


class SkipLayer(Layer):
    """A layer that pops or stashes skips."""

    @partial(uncompiled, recursive=False)  # Functions that it calls are compiled.
    def forward(self, value: Any) -> Any:
        """Compute the output from the values of the previous layer."""
        return self._run((value,) if self._number == 1 else value)

    @partial(uncompiled, recursive=False)
    def _run(self, values: Sequence[Any]) -> Any:
        output, stashed = self._code.function(self, *values, *_pop(self._pops))
        _stash(self._stashes, stashed)
        return output


class FirstLayer(SkipLayer):
    """The first layer, which takes the arguments of the original's forward."""

    def __init__(
        self, code: Code, inputs: Inputs, stashes: Sequence[str], namespace: Namespace
    ) -> None:
        super().__init__(code, 0, (), stashes, namespace)
        self._inputs = inputs

    @property
    def forward(self) -> Any:  # type: ignore[override]
        """A function with the signature of the original's forward."""
        return _Forward(self)


class _Forward:
    """The forward of a first layer."""

    _torchdynamo_disable = True

    def __init__(self, layer: FirstLayer) -> None:
        self._layer = layer
        self.__signature__ = layer._inputs.signature

    @partial(uncompiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer._run(self._layer._inputs.take(args, kwargs))


@uncompiled
def _pop(keys: Sequence[Key]) -> list[Any]:
    tracker = current_skip_tracker()
    return [tracker.load(None, *key) for key in keys]


@uncompiled
def _stash(keys: Sequence[Key], tensors: Sequence[Tensor]) -> None:
    tracker = current_skip_tracker()
    for key, tensor in zip(keys, tensors):
        tracker.save(None, *key, tensor)


def build(
    graph: fx.Graph,
    steps: Sequence[Sequence[fx.Node]],
    root: nn.Module,
    inputs: Inputs,
    constants: dict[str, Any],
) -> Converted:
    """Return a sequential module with a layer for each list of steps."""
    namespace = Namespace()
    names = all_names(root)
    order = {node: k for k, node in enumerate(by_use(graph))}
    constants = _named_by_use(order, constants)
    layers: list[nn.Module] = []
    for k, (own, route) in enumerate(zip(steps, routes(graph, steps))):
        if k == 0:
            route.received = [node for node in graph.nodes if node.op == 'placeholder']
        part, targets = _program(graph, own, route, order, last=k == len(steps) - 1)
        code = Code(
            *_source(part, root, constants),
            f'<layer {k} of {type(root).__name__}>',
            any(_may_be_loss(root, node) for node in part.nodes),
        )
        stashes = [name for name, _ in route.stashed]
        pops = [name for name, _ in route.popped]
        cls = SkipLayer if pops or stashes else Layer
        layer = (
            cls(code, len(route.received), pops, stashes, namespace)
            if k
            else FirstLayer(code, inputs, stashes, namespace)
        )
        layer.training = root.training
        for target in targets:
            if target in constants:
                layer.register_buffer(target, constants[target], persistent=False)
            else:
                put(layer, root, with_all_names(root, [target], names))
        layers.append(layer)
    return converted(layers, root)


def _named_by_use(order: Iterable[fx.Node], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Give constants names by the order of their uses, and return them by these names."""
    names: dict[str, str] = {}
    for node in order:
        if node.op == 'get_attr' and node.target in constants:
            node.target = names.setdefault(str(node.target), f'_constant_{len(names)}')
    return {new: constants[name] for name, new in names.items()}


def _program(
    graph: fx.Graph,
    steps: Sequence[fx.Node],
    route: Route,
    order: Mapping[fx.Node, int],
    last: bool,
) -> tuple[fx.Graph, list[str]]:
    """Return the graph of one layer, and the names of modules and tensors that it uses.

    The names are in the order of their uses, in which each process registers them.
    """
    part = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    targets: dict[str, int] = {}
    for node in (*route.received, *(node for _, node in route.popped)):
        values[node] = part.placeholder(node.name)

    def use(node: fx.Node) -> None:
        target = str(node.target)
        targets[target] = min(order[node], targets.get(target, order[node]))

    def value_of(node: fx.Node) -> fx.Node:
        if node.meta.get('device') and node not in values:
            here = next(x for x in values if x.meta['kind'] == 'tensor')
            values[node] = part.call_function(getattr, (values[here], 'device'))
        if node not in values:
            assert node.op == 'get_attr', node
            use(node)
            values[node] = part.get_attr(str(node.target))
        return values[node]

    for step in steps:
        values[step] = part.node_copy(step, value_of)
        if step.op == 'call_module':
            use(step)
    end = next(node for node in graph.nodes if node.op == 'output')
    given: Any = (
        fx.node.map_arg(end.args[0], value_of) if last else tuple(map(value_of, route.forwarded))
    )
    if len(route.forwarded) == 1:
        (given,) = given
    part.output((given, tuple(value_of(node) for _, node in route.stashed)))
    return part, sorted(targets, key=targets.__getitem__)


def _may_be_loss(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a node calls one of PyTorch's losses, or a module that contains one."""
    if node.op == 'call_module':
        return any(hasattr(x, 'reduction') for x in root.get_submodule(str(node.target)).modules())
    return node.op == 'call_function' and defaults_of(node.target) is not None


def _source(
    part: fx.Graph, root: nn.Module, constants: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    code = part.python_code('self')
    used: dict[str, Any] = {}
    for node in part.nodes:
        fx.node.map_aggregate(
            (node.args, node.kwargs),
            lambda x: used.setdefault(x.name, x.value) if isinstance(x, Constant) else None,
        )
    source = code.src
    for node in part.nodes:
        if node.op in ('call_module', 'get_attr'):
            source = _direct(source, str(node.target), _holder(root, str(node.target), constants))
    return source.strip() + '\n', {**code.globals, **used}


def _holder(root: nn.Module, target: str, constants: dict[str, Any]) -> str:
    """Return the name of a module's dictionary that has the target of a step, if one has it."""
    if target in constants:
        return '_buffers'
    path, _, name = target.rpartition('.')
    module = root.get_submodule(path)
    return next(
        (
            holder
            for holder in ('_modules', '_parameters', '_buffers')
            if name in getattr(module, holder)
        ),
        '',
    )


def _direct(source: str, target: str, holder: str) -> str:
    """Return a source that finds its target in dictionaries, because module attributes are slow.

    Also, the name of a module may then equal the name of a layer's attribute. The holder is the
    dictionary that has the target; it is empty for an attribute.

    >>> _direct('y = self.body.norm(x)', 'body.norm', '_modules')
    'y = self._modules["body"]._modules["norm"](x)'
    """
    usual = direct = 'self'
    atoms = target.split('.')
    for k, atom in enumerate(atoms):
        usual = f'{usual}.{atom}' if atom.isidentifier() else f'getattr({usual}, "{atom}")'
        where = '_modules' if k + 1 < len(atoms) else holder
        direct = f'{direct}.{where}["{atom}"]' if where else f'{direct}.{atom}'
    return re.sub(re.escape(usual) + r'(?=[(;\n])', direct, source)
