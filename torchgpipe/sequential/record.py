"""Record a forward: the graph of a module's operations, with guards, from one run.

:class:`ForwardTracer` records each step, and computes it for the sample. So a program can choose
its path, which may depend on whether there is a mask, or on the number of parts of a tensor. See
:mod:`torchgpipe.sequential.effects` for values, and :mod:`torchgpipe.sequential.patches` for the
detection of steps.

[Note: Dependencies of a recording]
The path of a program may depend on values that are the same for each micro-batch. A guard checks
these values in each run. The path may not depend on the elements of tensors, unless the other path
is an error. Nor may it depend on the training mode or on Python's random numbers. The whole
forward runs under one grad mode and autocast. A guard also checks whether the call is under
autocast.

A submodule that depends on training or changes modes becomes a leaf module. When one is found, its
class is added to the leaves, and the recording starts again. All other cases are errors, so that
it is no surprise how much is not looked into.

If a program depends on the training mode, it is recorded in the other mode as well. If both
recordings are the same, no leaf is needed. Otherwise, the cause is the module that last read the
mode before the recordings differ.

:func:`widen` makes a graph work for a batch of one sample::

    if len(x) != len(rows):               8 and 1: the path of the sample
        rows = rows.expand(len(x), -1)    1 and 1: the other path; to expand would change nothing

The graph of the whole sample is computed for one sample. If a guard fails, the forward is recorded
for the one sample as well. Both graphs may be the same, except for steps of the first graph that
return their inputs. Then they are one program as long as these steps do so, and one guard that
checks this replaces the failing guards.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointFunction

from torchgpipe.base.private import hooks_of
from torchgpipe.engine.checkpoint.observation import attributes_of, contents_of
from torchgpipe.sequential.cuts import Call
from torchgpipe.sequential.effects import TracedValue, modes_now, same_random_numbers
from torchgpipe.sequential.leaf_modules import LeafModules, modules_within
from torchgpipe.sequential.operations import (
    Constant,
    StepTracer,
    calls_in,
    compute,
    first_difference,
    guard,
    guard_ways,
    is_same,
    same_constants,
    words,
)
from torchgpipe.sequential.patches import followed
from torchgpipe.sequential.refusals import (
    OF_MASKS,
    ConversionError,
    NeedsLeaf,
    in_one_line,
    is_of_torch,
    is_within,
    line_of,
    only_raises,
    refused,
)

_LEN = len  # which is replaced while a forward runs


class UseOfTraining(NamedTuple):
    """A place where a program depends on the training mode."""

    #: The number of calls that were recorded before.
    position: int
    #: The innermost submodule, in a list that is empty for the model itself.
    module: list[nn.Module]
    line: str


class ForwardTracer(StepTracer):
    """Records one forward."""

    def __init__(self, root: nn.Module, leaves: LeafModules) -> None:
        super().__init__(root)
        self.leaves = leaves
        self.uses_of_training: list[UseOfTraining] = []
        #: The innermost submodule that has raised an error, if one has.
        self.inner: str | None = None
        #: The calls of submodules that were looked into, in the order in which they ended.
        self.calls: list[Call] = []
        self._paths = {module: name for name, module in root.named_modules()}
        self._looked_into = list(modules_within(root, leaves))
        #: The training modes of all modules, including modules within leaves.
        self._training = {each: each.training for each in root.modules()}
        self._guarded: set[tuple[fx.Node, str]] = set()
        self._stack: list[nn.Module] = []
        self._stopped: Exception | None = None

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the forward with values, and record it up to its result."""
        if any(hooks_of(self.root)):
            self.refuse(
                'it has hooks of its own', 'register them on its submodules, or on the GPipe'
            )
        self._modes = modes_now()
        before = [_contents(module) for module in self._looked_into]
        with self._training_as_values(), followed(self) as self.put_back:
            self.runs = True
            try:
                result = self.create_arg(self.simple(self.root.forward(*args, **kwargs)))
                self.check_modes()
                self.draws.check(self.refuse)
            except Exception as error:
                raise self._stopped or error  # noqa: B904 - it has its own cause
            finally:
                self.runs = False
                self.over = True
        if self._stopped is not None:  # The forward has caught it.
            raise self._stopped
        for module, old in zip(self._looked_into, before):
            self._check_contents(module, old)
        self.graph.output(result)

    @property
    def watches(self) -> bool:
        """Whether the forward runs now, and not a leaf."""
        return self.runs

    def called(
        self,
        module: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record the call of a leaf, or run another module to look into it."""
        if module not in self._paths:
            if next(module.parameters(), None) is not None:
                self.refuse(
                    f'it calls a {type(module).__name__} with parameters, which is not a '
                    'submodule of it'
                )
            return run(module, *args, **kwargs)
        if module in self.leaves:
            return self.create_proxy('call_module', self._paths[module], args, kwargs)
        self._stack.append(module)
        begin = len(self.graph.nodes)
        try:
            return run(module, *args, **kwargs)
        except Exception:
            self.inner = self.inner or self._paths[module]
            raise
        finally:
            self._stack.pop()
            self.calls.append(Call(module, range(begin, len(self.graph.nodes))))

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Return a value for a parameter or a buffer."""
        if isinstance(found, Tensor):
            return self.value_of(found)
        return found

    def written(self, module: nn.Module, name: str, value: object) -> None:
        """Refuse it: each micro-batch would do so, possibly on another device."""
        if module in self._paths:
            there = {**vars(module), **module._buffers, **module._parameters, **module._modules}
            is_first = there.get(name) is None or isinstance(value, (bool, str))  # a table, a flag
            self.refuse(
                f"it sets the attribute '{name}' of a module, which each micro-batch "
                'would do again',
                first=_CALL_IT_BEFORE if is_first else '',
            )

    def entered(self) -> None:
        """Make a module a leaf if a region of it sets a mode, even to the current mode."""
        self._need_leaf('it changes grad mode, inference mode or autocast for a part of it')

    def drew(self) -> None:
        """Refuse it: the graph would contain the single number that was drawn now."""
        self.refuse("it draws random numbers of Python's")

    def applied(self, function: type) -> None:
        """Refuse it: the graph would have only the function's forward, or nothing."""
        name = function.__name__
        self.refuse(
            f'it calls {name}.apply by a name that was bound before, which a recording '
            'does not see',
            f'call it where it is used, {name}.apply(…); or name a submodule that does as '
            'a leaf: to_sequential(model, sample, leaves=[…])',
        )

    def made(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record a call of a function that does not accept values."""
        if any(x is CheckpointFunction for x in args):
            self.refuse('it calls torch.utils.checkpoint')
        return self.create_proxy('call_function', function, args, kwargs)

    def concretize(self, value: Any, how: Callable[[Any], Any]) -> Any:
        """Return the number or boolean that the path of a program depends on, and guard it."""
        node = value.node
        example = value._example
        if (isinstance(example, Tensor) and how is not _LEN) or node.meta['data']:
            if how is bool and only_raises(sys._getframe(2)):
                self.add_guard(self.add_step(bool, node), bool(example), words(node))
                return bool(example)
            kind = type((self._stack or [self.root])[-1])
            more = OF_MASKS.get((kind, is_within('_detect_is_causal_mask')), '')
            if more:  # This advice is better than a leaf because of the training mode.
                self.uses_of_training.clear()
            self.refuse('its program goes by the elements of a tensor', more=more)
        if node.meta['grad']:
            self._need_leaf('its program goes by whether a tensor has a gradient')
        result = how(example)
        if node.meta['mode']:
            position = len(calls_in(self.graph))
            self.uses_of_training.append(UseOfTraining(position, self._stack[-1:], line_of()))
        elif (node, how.__name__) not in self._guarded:
            self._guarded.add((node, how.__name__))
            what = words(node)
            if how in (_LEN, bool) and result is not example:
                node = self.add_step(how, node)
                example = result
                what = f'{how.__name__}({what})'
            self.add_guard(node, example, what, _CUTS if how is operator.index else '')
        return result

    def to_bool(self, obj: Any) -> Any:
        """Refuse the conversion of an unknown value to a boolean."""
        self._refuse_unknown(f'its program goes by {words(obj.node)}')

    def iter(self, obj: Any) -> Any:
        """Refuse the iteration over an unknown value."""
        self._refuse_unknown(f'its program goes through {words(obj.node)}')

    def is_a(self, value: Any, classes: Any) -> bool:
        """Return the result of ``isinstance``, which without a sample is ``False`` for PyTorch."""
        if type(value) is TracedValue:
            return isinstance(value._example, classes)
        if not is_of_torch(sys._getframe(2)):
            self._refuse_unknown('its program asks for the type of a value')
        return False

    def is_tensor(self, value: Any) -> bool:
        """Return whether a value is a tensor, as far as is known."""
        return bool(value.node.meta['kind'] == 'tensor')

    def check_modes(self) -> None:
        """Check that the forward has not changed modes."""
        if modes_now() != self._modes:
            self.entered()

    def check_training(self, other: 'ForwardTracer') -> None:
        """Check that a recording in the other training mode is the same.

        Raises:
            NeedsLeaf: The recordings differ because of a submodule.
            ConversionError: The recordings differ because of the model itself.
        """
        position = first_difference(self.graph, self.constants, other.graph, other.constants)
        if position is not None:
            before = [each for each in self.uses_of_training if each.position <= position]
            last = (before or self.uses_of_training)[-1]
            if last.module:
                raise NeedsLeaf(f'{_BY_TRAINING} ({in_one_line(last.line)})', type(last.module[0]))
            raise refused(
                self.root,
                _BY_TRAINING,
                last.line,
                None,
                more='. Where it is for auxiliary heads, make it without them',
            )

    def _need_leaf(self, why: str) -> None:
        if not self._stack:
            self.refuse(why)
        why = f'{why} ({in_one_line(line_of())})'
        self._stopped = self._stopped or NeedsLeaf(why, type(self._stack[-1]))
        raise self._stopped

    def _refuse_unknown(self, why: str) -> Any:
        self.refuse(
            why + ', which is not known without a sample', 'give one: to_sequential(model, sample)'
        )

    def refuse(self, why: str, hint: str = '', more: str = '', first: str = '') -> Any:
        """Raise an error that names the line and the submodule."""
        inner = self._paths[self._stack[-1]] if self._stack else None
        self._stopped = self._stopped or refused(
            self.root, why, line_of(), inner, hint, more, first
        )
        raise self._stopped

    @contextmanager
    def _training_as_values(self) -> Iterator[None]:
        for module, mode in self._training.items():
            node = self.graph.get_attr(f'{self._paths[module]}.training'.lstrip('.'))
            module.__dict__['training'] = self.wrap(node, mode)
        try:
            yield
        finally:
            for module, mode in self._training.items():
                module.__dict__['training'] = mode

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Compute a step, with plain training modes in a leaf."""
        within = (
            list(self.root.get_submodule(str(node.target)).modules())
            if node.op == 'call_module'
            else []
        )
        values = {each: vars(each)['training'] for each in within if each in self._training}
        try:
            for each in values:
                vars(each)['training'] = self._training[each]
            return super()._called(node, args, kwargs)
        finally:
            for each, value in values.items():
                vars(each)['training'] = value

    def _check_contents(self, module: nn.Module, before: dict[str, list[Any]]) -> None:
        for name, now in _contents(module).items():
            old = before.get(name, [])
            if len(now) != len(old) or any(a is not b for a, b in zip(now, old)):
                raise refused(
                    self.root,
                    f"it changes what is in the attribute '{name}' of a module, which "
                    'each micro-batch would do again',
                    '  (a list, a dict or the like)',
                    self._paths[module] or None,
                    first='' if old else _CALL_IT_BEFORE,
                )


_BY_TRAINING = 'its program goes by the training mode'
_CUTS = '; if it cuts a tensor that is an attribute, make that a buffer by register_buffer'
_CALL_IT_BEFORE = 'if only its first call does that, as for a cache, call the model once before'


def _contents(module: nn.Module) -> dict[str, list[Any]]:
    found = {name: contents_of(name, value) for name, value in attributes_of(module).items()}
    return {name: contents for name, contents in found.items() if contents is not None}


def widen(tracer: StepTracer, one: Sequence[Tensor], record: Callable[[], StepTracer]) -> None:
    """Let one sample pass the guards of a graph, if the graph is correct for one sample."""
    if not any(node.target is guard for node in tracer.graph.nodes):
        return
    try:
        found = _computed(tracer, one)
    except Exception:  # The model does not accept one sample, such as a batch normalization.
        return
    failing = [
        node
        for node in tracer.graph.nodes
        if node.target is guard and found[node.args[0]] != node.args[1]
    ]
    if not failing:
        return
    try:
        other = record()
    except (ConversionError, NeedsLeaf):
        return
    ways = _Ways(tracer, other, found)
    if ways.are_one() and [*ways.others] == failing:
        _guard_both(tracer.graph, ways)


def asks_for_all(tracer: StepTracer, other: StepTracer) -> bool:
    """Return whether a graph is the same as another one, with at least the same guards."""
    return _Ways(tracer, other, {}).are_one()


def _computed(tracer: StepTracer, inputs: Sequence[Tensor]) -> dict[Any, Any]:
    """Return the result of each node of a graph for some inputs, without guards."""
    found: dict[Any, Any] = {}
    left = iter(inputs)

    with torch.no_grad(), same_random_numbers():
        for node in tracer.graph.nodes:
            target = str(node.target)
            if node.op == 'placeholder':
                found[node] = next(left)
            elif node.op == 'get_attr':
                found[node] = (
                    tracer.constants[target]
                    if target in tracer.constants
                    else attrgetter(target)(tracer.root)
                )
            elif node.op != 'output' and node.target is not guard:
                found[node] = compute(tracer.root, node, *_arguments(node, found.get))
    return found


def _arguments(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Return the arguments of a node, with nodes and constants replaced by their values."""

    def value(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return value_of(x)
        if type(x) is Constant:
            return x.value
        return x

    return fx.node.map_aggregate((node.args, node.kwargs), value)


def _inputs_of(tracer: StepTracer) -> list[fx.Node]:
    return [node for node in tracer.graph.nodes if node.op == 'placeholder']


class _Ways:
    """Two graphs of one forward, node by node."""

    def __init__(self, one: StepTracer, other: StepTracer, found: dict[Any, Any]) -> None:
        #: By guard of the first graph, the different value that the other graph expects.
        self.others: dict[fx.Node, Any] = {}
        #: Steps of the first graph alone, which return their inputs.
        self.same: list[fx.Node] = []
        self._one = one
        self._other = other
        self._found = found
        self._twins: dict[Any, fx.Node] = dict(zip(_inputs_of(one), _inputs_of(other)))
        named = {str(b.target): b for b in other.graph.nodes if b.op == 'get_attr'}
        constants = {name: value for name, value in other.constants.items() if name in named}
        for a in one.graph.nodes:
            if a.op == 'get_attr':
                name: str | None = str(a.target)
                if name in one.constants:
                    name = next(
                        (
                            other
                            for other, value in constants.items()
                            if same_constants(one.constants[name], value)
                        ),
                        None,
                    )
                elif name in constants:
                    name = None
                if name in named:
                    self._twins[a] = named[name]

    def are_one(self) -> bool:
        """Return whether all nodes are the same, except nodes that return their inputs."""
        ahead = [x for x in calls_in(self._other.graph) if x.op != 'placeholder']
        behind = []
        for node in calls_in(self._one.graph):
            if node.op == 'placeholder':
                continue
            if ahead and self._match(node, ahead[0]):
                behind.append(ahead.pop(0))
                self._twins[node] = behind[-1]
            elif node.op == 'output' or not self._may_be_left_out(node, behind):
                return False
        return True  # Both graphs end with their outputs.

    def _match(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op != b.op or a.target != b.target:
            return False
        if a.target is not guard:
            return bool(_arguments(a, self._twins.get) == _arguments(b, lambda x: x))
        if self._twins.get(a.args[0]) is not b.args[0]:
            return False
        if a.args[1] != b.args[1]:
            self.others[a] = b.args[1]
        return True

    def _may_be_left_out(self, node: fx.Node, behind: Sequence[fx.Node]) -> bool:
        before: Any = node.args[0] if node.args else None
        # A layer may have effects besides its result.
        if (
            before in self._twins
            and not (node.op == 'call_module' or node.meta['writes'])
            and is_same(self._found.get(before), self._found.get(node))
        ):
            self._twins[node] = self._twins[before]
            self.same.append(node)
            return True
        if node.meta['kind'] != 'plain':
            return node.target is guard
        for twin in behind:  # The other graph may have the same node earlier.
            if self._match(node, twin):
                self._twins[node] = twin
        return True


def _guard_both(graph: fx.Graph, ways: _Ways) -> None:
    """Replace the guards that fail for one of two paths by a single guard."""
    sames = []
    for node in ways.same:
        with graph.inserting_after(node):
            sames.append(graph.call_function(is_same, (node.args[0], node)))
        sames[-1].meta = {**node.meta, 'kind': 'plain', 'bytes': 0, 'memory': None, 'writes': []}
    guards = [*ways.others]
    order = {node: k for k, node in enumerate(graph.nodes)}
    with graph.inserting_after(max([*guards, *sames], key=order.__getitem__)):
        both = graph.call_function(
            guard_ways,
            (
                [each.args[0] for each in guards],
                [each.args[1] for each in guards],
                [*ways.others.values()],
                sames,
                [each.args[2:] for each in guards],
            ),
        )
    both.meta = dict(guards[0].meta)
    for each in guards:
        graph.erase_node(each)
