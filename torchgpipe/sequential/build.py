"""Build layers: a function from the steps of each layer, and the submodules that it calls."""
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from torchgpipe.means import LOSSES
from torchgpipe.sequential.cuts import Route, routes
from torchgpipe.sequential.layer import Code, FirstLayer, Inputs, Layer, SkipLayer
from torchgpipe.sequential.nodes import Constant
from torchgpipe.sequential.parts import Converted, all_names, converted, put, with_all_names
from torchgpipe.skip.tracker import Namespace

__all__ = ['build']


def build(graph: fx.Graph, steps: Sequence[Sequence[fx.Node]], root: nn.Module, inputs: Inputs,
          constants: dict[str, Any]) -> Converted:
    """Return a sequential module with a layer for each list of steps.

    Args:
        graph: The graph that they are of.
        steps: The steps of each layer.
        root: The model.
        inputs: Take the tensors out of what the first layer is called with.
        constants: What the graph refers to by name.
    """
    namespace = Namespace()
    names = all_names(root)
    layers: list[nn.Module] = []
    for k, (own, route) in enumerate(zip(steps, routes(graph, steps))):
        if k == 0:
            route.received = [node for node in graph.nodes if node.op == 'placeholder']
        part, targets = _program(graph, own, route, last=k == len(steps) - 1)
        code = Code(*_source(part, root, constants), f'<layer {k} of {type(root).__name__}>',
                    any(_may_be_loss(root, node) for node in part.nodes))
        stashes, pops = ([name for name, _ in x] for x in (route.stashed, route.popped))
        cls = SkipLayer if pops or stashes else Layer
        layer = (cls(code, len(route.received), pops, stashes, namespace) if k else
                 FirstLayer(code, inputs, stashes, namespace))
        layer.training = root.training
        for target in targets:
            if target in constants:
                layer.register_buffer(target, constants[target], persistent=False)
            else:
                put(layer, root, with_all_names(root, [target], names))
        layers.append(layer)
    return converted(layers, root)


def _program(graph: fx.Graph, steps: Sequence[fx.Node], route: Route, last: bool
             ) -> tuple[fx.Graph, list[str]]:
    """Return the graph of one layer, and the names of what it calls and reads."""
    part = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    targets: dict[str, None] = {}
    for node in (*route.received, *(node for _, node in route.popped)):
        values[node] = part.placeholder(node.name)

    def value_of(node: fx.Node) -> fx.Node:
        if node.meta.get('device') and node not in values:
            here = next(x for x in values if x.meta['kind'] == 'tensor')
            values[node] = part.call_function(getattr, (values[here], 'device'))
        if node not in values:
            assert node.op == 'get_attr', node
            targets.setdefault(str(node.target))
            values[node] = part.get_attr(str(node.target))
        return values[node]

    for step in steps:
        values[step] = part.node_copy(step, value_of)
        if step.op == 'call_module':
            targets.setdefault(str(step.target))
    end = next(node for node in graph.nodes if node.op == 'output')
    given: Any = (fx.node.map_arg(end.args[0], value_of) if last
                  else tuple(map(value_of, route.forwarded)))
    if not last and len(route.forwarded) == 1:
        given, = given
    part.output((given, tuple(value_of(node) for _, node in route.stashed)))
    return part, [*targets]


def _may_be_loss(root: nn.Module, node: fx.Node) -> bool:
    """Return whether a node calls a loss of PyTorch's, or a module that has one."""
    if node.op == 'call_module':
        return any(hasattr(x, 'reduction') for x in root.get_submodule(str(node.target)).modules())
    return node.op == 'call_function' and node.target in LOSSES


def _source(part: fx.Graph, root: nn.Module, constants: dict[str, Any]
            ) -> tuple[str, dict[str, Any]]:
    code = part.python_code('self')
    used: dict[str, Any] = {}
    for node in part.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), lambda x: (
            used.setdefault(x.name, x.value) if isinstance(x, Constant) else None))
    source = code.src
    for node in part.nodes:
        if node.op in ('call_module', 'get_attr'):
            source = _direct(source, str(node.target), _holder(root, str(node.target), constants))
    return source.strip() + '\n', {**code.globals, **used}


def _holder(root: nn.Module, target: str, constants: dict[str, Any]) -> str:
    """Return the name of the dictionary of a module that has what a step uses, if one does."""
    if target in constants:
        return '_buffers'
    path, _, name = target.rpartition('.')
    module = root.get_submodule(path)
    return next((holder for holder in ('_modules', '_parameters', '_buffers')
                 if name in getattr(module, holder)), '')


def _direct(source: str, target: str, holder: str) -> str:
    """Let a source find what it uses in dictionaries: a module is slow to look for attributes.

    Nor does it matter then if a module has the name of an attribute of layers. The holder is the
    dictionary that has what is used; there is none for an attribute.

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
