"""Random numbers of a cell's first pass, repeated in its recomputation.

:class:`Draws` saves the state of each generator when a cell starts. The recomputation restores
this state, and afterwards the present one::

    first pass       before ──▶ layers draw ──▶ after ── …
    recomputation    … now │ before ──▶ layers draw ──▶ after? │ now …

It is the same on all devices. The generators are the device's generator, generators that the
layers own, and the CPU's generator if the layers were seen to draw from it.

[Note: Generator of the CPU]
All threads share it. So cells and recomputations hold
:data:`~torchgpipe.base.locks.generator_lock` while they draw from it or restore its state.
Partitions that draw take turns: see [Note: Order of draws] of the pipeline. (A partition with a
pipeline in it does not hold the lock in its cells, because the inner workers need it.) A thread of
the user may still draw in the middle of a cell. The recomputation then ends in another state than
the first pass, and raises.

A dispatch mode (:class:`Recorder`) shows in the first cell of a partition whether its layers draw.
It costs about 10 µs per operation, so later cells run without it. If layers begin to draw later,
the state of the generator differs after the pass (:class:`DrawMonitor`). Their recomputation then
runs in the mode, and raises if it draws.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchgpipe.base.devices import has_own_state
from torchgpipe.base.errors import other_path
from torchgpipe.base.locks import generator_lock, new_lock
from torchgpipe.base.private import (
    InternalMode,
    generator_key,
    schema_of,
    tree_leaves,
    unseen,
)
from torchgpipe.engine.streams import no_context

T = TypeVar('T')

_cpu = torch.default_generator


class Generator(Protocol):
    """A random generator."""

    def get_state(self) -> Tensor:
        """Return a copy of its state."""

    def set_state(self, state: Tensor) -> object:
        """Set its state."""


States = dict[Generator, Tensor]


class _DeviceGenerator:
    """The default generator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._device = device

    def get_state(self) -> Tensor:
        return self._module.get_rng_state(self._device)  # type: ignore[no-any-return]

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)


@cache
def generators_of(device: torch.device) -> tuple[Generator, ...]:
    """Return the default generator of a device, except the CPU's, which threads share."""
    return (_DeviceGenerator(device),) if has_own_state(device) else ()


# PyTorch takes a generator's mutex while it holds the GIL. Making the tensor for the state may
# start Python's garbage collector, which may release the GIL. Two threads could then wait for each
# other forever. A thread that waits for a Python lock releases the GIL. Reentrant, because an
# object that the collector frees may draw.
_lock = new_lock()


def state_of(generator: Generator) -> Tensor:
    """Return a copy of a generator's state."""
    with _lock:
        return generator.get_state()


def states_of(generators: Iterable[Generator]) -> States:
    """Return copies of the states of several generators."""
    return {generator: state_of(generator) for generator in generators}


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two states are equal."""
    with unseen():
        # Bytes, whose number is a multiple of 8, are compared faster as integers.
        return torch.equal(a.view(torch.int64), b.view(torch.int64))


class Drawing(Enum):
    """Whether some code draws from a random generator that other threads may use."""

    #: It was not observed yet, and is observed when it runs next: NO or YES.
    UNKNOWN = 0
    #: It was observed not to draw. If a monitor detects a draw later: UNKNOWN.
    NO = 1
    #: It was observed to draw. This does not change, because it may draw at any time.
    YES = 2

    @staticmethod
    def of(draws: bool) -> 'Drawing':
        """Return YES or NO."""
        return Drawing.YES if draws else Drawing.NO


class Draws:
    """The random numbers of one cell; of several cells, if there is no generator to save.

    Args:
        monitor: Detects draws from the CPU's generator during the first pass, if this generator is
            not among ``generators``.
    """

    def __init__(
        self,
        generators: Iterable[Generator],
        recorder: 'Recorder | None' = None,
        monitor: 'DrawMonitor | None' = None,
    ) -> None:
        self._generators = [*generators]
        if recorder is not None:
            self._generators.append(_cpu)
        self._recorder = recorder
        self.monitor = monitor
        #: The states at the start of the first pass.
        self._before: States = {}
        #: The states that a recomputation has set.
        self._last: States = {}
        #: The states before and after the first pass, for generators that were drawn from.
        self.states: dict[Generator, tuple[Tensor, Tensor]] = {}

    def first_pass(self, function: Callable[[], T]) -> T:
        """Run the cell for the first time."""
        if not self._generators:
            return function()
        recorder = self._recorder
        self._recorder = None
        self._before = states_of(self._generators)
        if recorder is None:
            output = function()
        else:
            # The recorder adds the generators that are arguments of operations.
            recorder.before = self._before
            output = recorder.run(function)
            if not recorder.draws:
                del self._before[_cpu]  # If its state changed, another thread has drawn.

        for generator, before in self._before.items():
            after = state_of(generator)
            if not same(before, after):
                self.states[generator] = before, after
        return output

    def replay(self, function: Callable[[], T]) -> T:
        """Run the cell again, with the random numbers of the first pass.

        Raises:
            RuntimeError: Another thread drew from the same generator, or the cell drew from one
                whose state was not saved.
        """
        if self.monitor is not None and self.monitor.drawn:
            function = partial(_without_draws, function)
        lock = generator_lock if _cpu in self.states else no_context
        with lock:
            present = states_of(self.states)
            try:
                for generator, (before, _) in self.states.items():
                    generator.set_state(before)
                    self._last[generator] = before
                output = function()
                end = states_of(self.states)
            finally:
                for generator, state in present.items():
                    generator.set_state(state)
        for generator, (_, after) in self.states.items():
            # Layers may well draw in their first pass only.
            if not _is_one_of(end[generator], after, self._last[generator]):
                raise disturbed()
        return output

    def position(self) -> States:
        """Return the present states of the generators."""
        return states_of(self._before)

    def go_to(self, start: States, end: States) -> None:
        """Make the generators of a recomputation skip the draws of a marked layer.

        Raises:
            RuntimeError: They are in another state than in the first pass before the layer,
                because another thread drew.
        """
        for generator in self.states.keys() & end.keys():
            before, _ = self.states[generator]
            expected = start.get(generator, before)
            # Layers may well draw in their first pass only.
            if not _is_one_of(state_of(generator), expected, self._last[generator]):
                raise disturbed()
            generator.set_state(end[generator])
            self._last[generator] = end[generator]


def _is_one_of(state: Tensor, *states: Tensor) -> bool:
    return any(same(state, other) for other in states)


def _without_draws(function: Callable[[], T]) -> T:
    recorder = Recorder()
    output = recorder.run(function)
    if recorder.draws:
        raise other_path('it drew random numbers where the first pass was not known to')
    return output


def disturbed() -> RuntimeError:
    """Return the error about a cell whose random numbers cannot be repeated."""
    return RuntimeError(
        'another thread drew from the random generator of a checkpointed micro-batch while it '
        'ran, so its random numbers cannot be repeated. Give that thread a torch.Generator of its '
        "own, or use checkpoint='never'."
    )


class DrawMonitor:
    """A monitor of draws from the CPU's generator since its construction.

    The draws may come from cells that were not seen to draw before, or from another thread.
    """

    def __init__(self) -> None:
        self.drawn = False
        self._before = state_of(_cpu)

    def check(self) -> bool:
        """Return whether the generator's state has changed, and store the answer in ``drawn``."""
        self.drawn = not same(self._before, state_of(_cpu))
        return self.drawn


# Operations that draw.


class Operation(NamedTuple):
    """Properties of an operation, as a dispatch mode sees it."""

    #: Whether it may draw random numbers. Operations of other libraries need not declare it.
    may_draw: bool
    #: The position of its generator among its arguments, if it takes one.
    generator: int | None
    #: Positions and names of the arguments that it writes to.
    written: tuple[tuple[int, str], ...]
    #: The position of its argument ``training``, if it writes only then.
    training: int | None = None
    #: Whether it only returns new tensors: no argument, no view, and without a side effect.
    makes_tensors: bool = True
    #: Whether it takes the options of a new tensor, as a factory or a cast does.
    takes_options: bool = False

    def generator_of(
        self,
        args: Any,
        kwargs: Any,
    ) -> torch.Generator | None:
        """Return the generator among the arguments of a call, if there is one."""
        if self.generator is None:
            return None
        generator: torch.Generator | None = kwargs.get('generator')
        if self.generator < len(args):
            generator = args[self.generator]
        return generator

    def written_by(
        self,
        args: Any,
        kwargs: Any,
    ) -> Iterator[Tensor]:
        """Yield the tensors that a call writes to."""
        if self.training is not None and not args[self.training]:
            return
        for k, name in self.written:
            argument = args[k] if k < len(args) else kwargs.get(name)
            for x in tree_leaves(argument):
                if isinstance(x, Tensor):
                    yield x


@cache
def operation_of(func: Any) -> Operation:
    """Return the properties of an operation."""
    schema = schema_of(func)
    if schema is None:
        return Operation(False, None, ())
    positions: dict[str, int] = {}
    written = []
    aliases = func.namespace in ('c10d', 'prim')
    for k, argument in enumerate(schema.arguments):
        positions[argument.name] = k
        if argument.alias_info:
            aliases = True
        # Collectives do not declare that they write to their tensors.
        if func.namespace == 'c10d' or argument.alias_info and argument.alias_info.is_write:
            written.append((k, argument.name))

    training = None
    if 'running_mean' in positions:
        # Normalization functions do not declare that they write to their running statistics.
        training = positions.get('training')
    if training is not None:
        for name in ('running_mean', 'running_var'):
            written.append((positions[name], name))
    generator = positions.get('generator')
    may_draw = (
        generator is not None
        or func.namespace not in ('aten', 'prims')
        or torch.Tag.nondeterministic_seeded in func.tags
    )
    returns_tensors = any('Tensor' in str(value.type) for value in schema.returns)
    # A later operation may read statistics that an operation has written.
    makes_tensors = returns_tensors and not (aliases or written) and str(func) != _UNDECLARED_VIEW
    return Operation(
        may_draw,
        generator,
        tuple(written),
        training,
        makes_tensors=makes_tensors or str(func) == _RAGGED,
        takes_options='pin_memory' in positions,
    )


#: A view that is declared as a new tensor, because its argument is not used any more.
_UNDECLARED_VIEW = 'aten._unsafe_view.default'

#: A view with a ragged size that is like no other, so a repetition would not return the same.
_RAGGED = 'aten._nested_view_from_jagged.default'


class Recorder(InternalMode):
    """A mode that detects whether operations draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Whether any operation drew from the CPU's generator.
        self.draws = False
        #: The generator arguments of operations by key, and the states of generators before.
        self.generators: dict[int, torch.Generator] = {}
        self.before: States = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if not operation.may_draw:
            return func(*args, **kwargs)
        generator = operation.generator_of(args, kwargs)
        if generator is not None:
            key = generator_key(generator)
            if key not in self.generators:
                self.generators[key] = generator
                self.before[generator] = state_of(generator)
        before = state_of(_cpu)
        output = func(*args, **kwargs)
        self.draws = self.draws or not same(before, state_of(_cpu))
        return output
