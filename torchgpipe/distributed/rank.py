"""The state of one rank: its place in the mesh, its layers and their execution."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from torchgpipe.base.devices import is_cpu, rng_states, set_rng_states
from torchgpipe.base.structure import Gradients
from torchgpipe.distributed.agreement import (
    Facts,
    Shared,
    details,
    differ,
    differences,
    digest,
    numbers_of,
    together,
)
from torchgpipe.distributed.layers import Ties, fill, shared_in, split_layer, tie_again, ties_of
from torchgpipe.distributed.mesh import (
    Edges,
    alike,
    axis_of,
    device_of,
    groups_of_edges,
    lines_of,
    take_first,
    whole_group,
)
from torchgpipe.distributed.reduction import Replicas, Unit, grouped
from torchgpipe.engine.cell import Sequential
from torchgpipe.engine.partition import Engine, named_slots
from torchgpipe.model.materialize import seeded
from torchgpipe.model.weights import Weights
from torchgpipe.schedule.messages import ACTIVE, edges
from torchgpipe.shard.collectives import gathered
from torchgpipe.shard.nn.experts import Experts
from torchgpipe.shard.sums import local, split_axes
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.skip.skippable import Skippable

#: Attributes that all modules have.
_OF_MODULES = {*vars(nn.Module())}


class Rank:
    """One rank of a mesh.

    Attributes:
        last: The ranks with the last stage.
        alike: The ranks at the same place along the tensor axis, with any stages.
        ranks: The rank of each stage in this replica, among all processes.
        made: Its layers, by name.
        partitions: The layers of each stage; stages of other ranks are empty.
        engine: Runs them. It has all stages; stages of other ranks have no layers.
        at_place: For each rank along the pipe axis, all ranks that have the same stages.
        lines: By axis, the ranks along it, for each place along the others.
        exchanges: Whether replicas exchange samples: the model has experts.
        tied: The tensors in several places.
        replaced: The names of layers that were replaced since the last step.
        ties: The parameters that other ranks also have.
        replicas: The stages, and the reduction of their gradients.
        saving: The last checkpoint that was not waited for.

    Raises:
        ValueError: The mesh or the places do not fit.
    """

    made: dict[str, nn.Module]
    edges: Edges
    engine: Engine
    exchanges: bool
    ties: Ties
    replicas: Replicas
    _ties_type = Ties
    _replicas_type = Replicas

    def __init__(
        self, mesh: DeviceMesh, places: Sequence[int] | None, stages: Sequence[Sequence[str]]
    ) -> None:
        self._mesh = mesh
        self.data, self.pipe, self.tensor = (
            axis_of(mesh, name) for name in ('data', 'pipe', 'tensor')
        )
        self.everyone = whole_group(mesh)
        self.alike = alike(mesh, 'tensor')
        self.device = device_of(mesh)
        #: The rank along the pipe axis of each stage.
        self.places = _parse_places(places, len(stages), self.pipe.size)
        self.ranks = [self.pipe.ranks[place] for place in self.places]
        self.at_place = [alike(mesh, 'pipe', place) for place in range(self.pipe.size)]
        self.lines = lines_of(mesh)
        self.last = self.at_place[self.places[-1]]
        #: The names of the layers of each stage.
        self.stages = stages
        #: The stages of this rank.
        self.own = [j for j, place in enumerate(self.places) if place == self.pipe.rank]
        self.skips: frozenset[tuple[int, int]] = frozenset()
        self.replaced: list[str] = []
        #: By layer, the names in its state dict.
        self._saved_names: dict[str, set[str]] = {}
        self.saving: Any = None

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this rank, whose generators are saved."""
        return [self.device]

    @property
    def gathers_again(self) -> bool:
        """Whether ranks free parameters of stages, and gather them again, within a step."""
        most = max(self.places.count(place) for place in range(self.pipe.size))
        return self.replicas.shards and most > self._most

    @property
    def is_first(self) -> bool:
        """Whether it has the first stage."""
        return self.places[0] == self.pipe.rank

    @property
    def is_last(self) -> bool:
        """Whether it has the last stage."""
        return self.places[-1] == self.pipe.rank

    def make(
        self,
        model: Any,
        skeleton: nn.Sequential,
        seed: int,
        weights: Weights | None,
        init: Callable[[nn.Module], Any] | None,
        plan: Mapping[str, Any],
        data: str,
        policies: Mapping[str, Any],
        most: int | None,
    ) -> None:
        """Make the layers of this rank.

        Args:
            most: How many units are whole at a time; ``None`` for the default.
        """
        stages = self.stages
        own = self.own
        self.exchanges = self.data.size > 1 and any(
            isinstance(module, Experts) for module in skeleton.modules()
        )
        # Shared tensors are detected while the layers are as the user made them.
        self.tied = ties_of(skeleton, stages)
        self._layout = layout = inspect_skip_layout(
            [
                nn.Sequential(OrderedDict((name, skeleton.get_submodule(name)) for name in names))
                for names in stages
            ]
        )
        self.skips = frozenset(
            (prev_j, j) for j in range(len(stages)) for prev_j, _ in layout.incoming(j)
        )
        offloads = isinstance(policies.get('offload_policy'), CPUOffloadPolicy)
        self._most = most or (1 if offloads else ACTIVE)
        with_values = {
            name
            for name, layer in skeleton.named_children()
            if model is skeleton
            and not any(x.is_meta for x in (*layer.parameters(), *layer.buffers()))
        }

        split: dict[nn.Module, tuple[str, str]] = {}

        def finish(name: str, layer: nn.Module) -> None:
            if name in with_values:
                for axis in (self.data, self.tensor):
                    take_first(layer, axis)
            split_layer(name, layer, plan, self.tensor.mesh, split)
            if self.data.mesh is not None:
                for module in layer.modules():
                    if isinstance(module, Experts) and not module.communicates:
                        module.spread(self.data.mesh)

        kept = (
            []
            if model is not skeleton
            else [
                (f'{name}.{path}', x)
                for names in stages
                for name in names
                for path, x in skeleton.get_submodule(name).named_parameters()
            ]
        )
        shared = (
            shared_in({name: skeleton.get_submodule(name) for j in own for name in stages[j]})
            if model is skeleton
            else []
        )

        self._policies = {**policies, 'mesh': self._mesh['data']} if policies else {}
        if offloads and is_cpu(self.device):
            # Pinned memory is of no use if the device is the host.
            self._policies['offload_policy'] = CPUOffloadPolicy(pin_memory=False)
        self._units = dict[int, Unit]()
        self.partitions = [Sequential() for _ in stages]
        late = self._stages_of_ties(skeleton)
        modules = {j: nn.ModuleList(map(skeleton.get_submodule, stages[j])) for j in own}
        groups = grouped(modules, late)

        def make() -> Facts:
            made: dict[str, nn.Module] = {}
            for group in groups:  # The device has the layers of one group at a time.
                made.update(
                    self._fill(
                        model,
                        skeleton,
                        [name for j in group for name in stages[j]],
                        seed,
                        weights,
                        init,
                        finish,
                    )
                )
                tie_again(shared, made)
                self._fill_partitions(group, made)
                if data == 'shard' and (self.data.group is not None or policies):
                    self._units.update(dict.fromkeys(group, self._unit(group, late)))
            self.made = {name: made[name] for j in own for name in stages[j]}
            return Facts(layers=digest(self._registered()))

        self._check_registered(self.together('this model', make))
        self.edges = groups_of_edges(self._mesh, edges(self.places, self.skips))
        self._assemble()
        self.ties.spread(self.device)
        live = {id(x) for layer in self.made.values() for x in layer.parameters()}
        #: The parameters of the module that this rank does not use, by number: layers of other
        #: ranks have them, or other values took their place. A number may be reused.
        self._unused = {id(x): (name, weakref.ref(x)) for name, x in kept if id(x) not in live}
        self.together('this model', self._check_unused)

    def _registered(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the parameters and saved buffers of this rank.

        FSDP exchanges parameters in the order in which modules register them. All else is
        exchanged in the order of names.
        """
        found = []
        for layer, module in self.made.items():
            saved = module.state_dict(prefix=f'{layer}.').keys()
            for name, _, x in named_slots(module, layer):
                if name in saved:
                    found.append((name, tuple(x.shape)))
        return found if self._units else sorted(found)

    def check_skeleton(self, skeleton: nn.Module) -> None:
        """Check that all ranks have the same model: also the layers of other ranks.

        Raises:
            ValueError: Their layers have other tensors.
        """
        saved = skeleton.state_dict().keys()
        tensors = sorted(
            (name, tuple(x.shape)) for name, _, x in named_slots(skeleton) if name in saved
        )
        said = self.together('this model', lambda: Facts(layers=digest(tensors)))
        if len({each.layers for each in said.values()}) > 1:
            assert self.everyone is not None
            first, *others = zip(said, gathered(tensors, self.everyone))
            for rank, each in others:
                if each != first[1]:
                    raise other_model(first[0], first[1], rank, each)

    def _check_registered(self, said: Mapping[int, Facts]) -> None:
        """Check that ranks with the same stages can exchange their tensors.

        Raises:
            ValueError: They have other tensors, or FSDP would exchange them in another order.
        """
        if all(len({said[rank].layers for rank in ranks}) == 1 for ranks in self.at_place):
            return
        assert self.everyone is not None
        registered = dict(zip(said, gathered(self._registered(), self.everyone)))
        for ranks in self.at_place:
            first, *others = sorted(ranks)
            for rank in others:
                if registered[rank] != registered[first]:
                    raise other_tensors(first, registered[first], rank, registered[rank])

    def _fill(self, *args: Any) -> Mapping[str, nn.Module]:
        """Return some layers with their values: see :func:`fill`."""
        model, skeleton, own, *rest = args
        return fill(model, skeleton, own, self.device, *rest)

    def _stages_of_ties(self, skeleton: nn.Sequential) -> set[int]:
        """Return the stages of this rank with a parameter of which other ranks have a copy."""
        parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
        return {
            j
            for tie in self.tied
            if len({self.ranks[each] for each, _ in tie}) > 1
            for j, full in tie
            if j in self.own and full in parameters
        }

    def _fill_partitions(self, stages: Iterable[int], made: Mapping[str, nn.Module]) -> None:
        for j in stages:
            self.partitions[j]._modules.update((name, made[name]) for name in self.stages[j])

    def _unit(self, stages: Sequence[int], late: Container[int]) -> Unit:
        """Shard the parameters of some stages over replicas."""
        layers = [self.partitions[j] for j in stages]
        spread = {
            x for layer in layers for x in layer.parameters() if self.data.name in split_axes(x)
        }
        return Unit(
            layers,
            spread,
            any(j in late for j in stages),
            {'mesh': self.data.mesh, **self._policies},
        )

    def _check_unused(self) -> None:
        """Check that no layer keeps parameters that took another form, and none had hooks.

        Raises:
            ValueError: A layer keeps one, or one had hooks.
        """
        for layer, made in self.made.items():
            for path, module in made.named_modules(prefix=layer):
                for key, value in vars(module).items():
                    for x in [] if key in _OF_MODULES else _tensors_in(value):
                        self._check_unused_one(x, f"'{path}.{key}'")
        for name, reference in self._unused.values():
            hooked = reference()
            if (
                name.partition('.')[0] in self.made
                and hooked is not None
                and hooked._backward_hooks
            ):
                raise ValueError(
                    f"'{name}' has a hook, but another tensor took its place, on a "
                    'device or in parts: register hooks on model.get_parameter(name)'
                )

    def _check_unused_one(self, x: Any, where: str) -> None:
        name, reference = self._unused.get(id(x), ('', None))
        if reference is not None and reference() is x:
            raise ValueError(
                f"{where} is or has '{name}', a parameter of a layer on another rank "
                'or one that took another form, so it would not change any more. Let '
                'the layer have it as a parameter (then it is tied), or put both '
                'layers on one rank'
            )

    def _assemble(self) -> None:
        """Build partitions, ties, replicas and engine for the current layers."""
        self._fill_partitions(self.own, self.made)
        self.ties = self._ties_type(
            self.made, self.tied, self.ranks, self.pipe.group, self.pipe.ranks[self.pipe.rank]
        )
        self.replicas = self._replicas_type(
            {j: self.partitions[j] for j in self.own},
            self.data,
            self._policies,
            self._units,
            self._most,
            self.ties.numbers,
        )
        self.ties.remember()
        self.engine = Engine(self.partitions, [self.device] * len(self.partitions), self._layout)

    def copied(self, made: dict[str, Any]) -> 'Rank':
        """Return the same rank with copies of its layers; process groups are shared."""
        if self.replicas.shards:
            raise TypeError(
                "parameters that are spread over replicas (data='shard') cannot be "
                'copied with their model: save(folder), and load it into another one'
            )
        new = copy(self)
        new.made = made
        new.replaced = [*self.replaced]
        new.saving = None
        new.partitions = [Sequential() for _ in new.partitions]
        new._assemble()
        pending = self.replicas.pending
        new.replicas.pending = {
            id(own): pending[id(x)].clone()
            for x, own in zip(self.replicas.parameters(), new.replicas.parameters())
            if id(x) in pending
        }
        return new

    def replace(self, layers: Mapping[str, Any]) -> None:
        """Replace some layers; the new ones get the values of the first replica.

        Raises:
            ValueError: A layer is on another rank, or one that other ranks share or have parts of.
        """
        tied = {full.partition('.')[0] for tie in self.tied for _, full in tie}
        for name, layer in layers.items():
            if name not in self.made:
                raise ValueError(f"layer '{name}' is on another rank; replace it there")
            if not isinstance(layer, nn.Module):
                raise ValueError(f"layer '{name}' is {layer}")
            if (
                self.replicas.shards
                or self.tensor.mesh is not None
                or name in tied
                or _skips_of(layer) != _skips_of(self.made[name])
            ):
                raise ValueError(
                    f"layer '{name}' has parameters or skips that other ranks share "
                    'or have parts of, so it cannot be replaced on one of them: '
                    'replace it in the module, and make the model of that'
                )
            self.made[name] = layer.to(self.device)
        syncs = self.replicas.syncs
        pending = self.replicas.pending
        self._assemble()
        self.replicas.syncs = syncs
        self.replicas.pending = pending
        self.replaced += layers

    def outline(self, *more: object) -> int:
        """Return a digest of the state that ranks with the same stages share, except values."""
        return digest(
            more,
            [
                (
                    name,
                    [(key, x.shape, x.dtype) for key, x in self.made[name].state_dict().items()],
                )
                for name in self.replaced
            ],
        )

    def check_outlines(self, said: Mapping[int, Facts]) -> None:
        """Copy the values of the first replica to replaced layers, after a check on all ranks.

        Raises:
            RuntimeError: Replicas have different layers, or the same layers in different states.
        """
        for ranks in self.at_place:
            if len({said[each].layers for each in ranks}) > 1:
                raise RuntimeError(
                    f'ranks {sorted(ranks)} have the same stages, but not in the same state: some '
                    'have replaced others of their layers than the rest, or by layers of other '
                    'shapes; or modes (train, eval), parameters that require grad, or autocast '
                    'differ. Do the same on all of them'
                )
        for name in self.replaced:
            take_first(self.made[name], self.data)
        self.replaced = []

    def check_samples(self, said: Mapping[int, Facts]) -> None:
        """Check that ranks along the tensor axis were given the same samples.

        Raises:
            ValueError: The samples differ.
        """
        for ranks in self.lines['tensor']:
            if len({said[each].given for each in ranks}) > 1:
                raise ValueError(
                    f'ranks {ranks} along the tensor axis compute each layer '
                    'together, so they take the same samples, but were given others'
                )

    def shared(
        self, loss: Mapping[str, Tensor] | None = None, within_step: bool = False
    ) -> list[Shared]:
        """Return the tensors that other ranks may share, except tensors of replaced layers.

        Args:
            within_step: Whether a step runs. Then FSDP would free whole parameters when a layer
                makes its state dict, so the names from the start of the step are used.
        """
        if loss is not None:
            return [
                Shared(name, local(x), frozenset({'data', 'tensor'} - split_axes(x)))
                for name, x in loss.items()
            ]
        found: dict[int, Shared] = {}
        ties = self.ties.shared
        if not within_step:
            self._saved_names = {
                name: {*layer.state_dict(prefix=f'{name}.')}
                for name, layer in self.made.items()
                if name not in self.replaced
            }
        for layer in self._saved_names:
            for full, _, x in named_slots(self.made[layer], layer):
                name, others = ties.get(id(x), (full, 0))
                found.setdefault(
                    id(x),
                    Shared(
                        name,
                        local(x),
                        frozenset({'data', 'tensor'} - split_axes(x)),
                        others,
                        full not in self._saved_names[layer],
                    ),
                )
        return sorted(found.values(), key=lambda each: each.name)

    def numbers(
        self, loss: Mapping[str, Tensor] | None = None, within_step: bool = False
    ) -> tuple[int, int, int]:
        """Return the numbers of this rank's tensors, for :meth:`compare`."""
        if self.everyone is None:
            return 0, 0, 0
        return numbers_of(self.shared(loss, within_step))

    def compare(
        self,
        said: Mapping[int, Facts],
        loss: Mapping[str, Tensor] | None = None,
        within_step: bool = False,
    ) -> None:
        """Compare the tensors that ranks share, of the model or of a loss.

        Raises:
            RuntimeError: A tensor differs.
        """
        if self.everyone is not None and differ(
            {rank: each.numbers for rank, each in said.items()}, self.lines
        ):
            found = gathered(details(self.shared(loss, within_step)), self.everyone)
            text = differences(dict(zip(said, found)), self.lines)
            if text:
                raise RuntimeError(text)

    def compare_gradients(self, gradients: Gradients) -> None:
        """Compare the gradients of parameters that ranks along the tensor axis have whole.

        Raises:
            RuntimeError: A gradient differs, such as that of a norm of heads, of which each rank
                has some.
        """
        if self.tensor.size == 1:
            return
        names = {id(x): name.split('.', 2)[2] for name, x in self.replicas.named_parameters()}
        shared = sorted(
            [
                Shared(names[id(x)], grad, frozenset({'tensor'}))
                for x, grad in gradients
                if id(x) in names and not isinstance(x, DTensor)
            ],
            key=itemgetter(0),
        )
        said = self.together('the gradients of a step', lambda: Facts(numbers=numbers_of(shared)))
        if differ({rank: each.numbers for rank, each in said.items()}, self.lines):
            assert self.everyone is not None
            found = gathered(details(shared), self.everyone)
            raise RuntimeError(differences(dict(zip(said, found)), self.lines, gradients=True))

    def apply(self, function: Callable[[nn.Module], None], seed: int) -> None:
        """Apply a function to all modules, with the random numbers of (seed, layer) on each rank.

        Raises:
            RuntimeError: It draws values for tensors of which ranks have parts.
        """
        names = [name for stage in self.stages for name in stage]

        def run() -> None:
            for name, layer in self.made.items():
                parts = any(isinstance(x, DTensor) for x in layer.parameters())
                with seeded(seed, names.index(name), self.device) as drew:
                    layer.apply(function)
                if parts and drew():
                    raise RuntimeError(
                        f"apply has drawn random numbers for layer '{name}', of which ranks have "
                        'parts, so they would differ from one process; give the model the '
                        'function when it is made: init=function'
                    )

        self.together('apply', run)
        self.ties.spread(self.device)

    def check(self) -> None:
        """Check that the parameters of this rank are the same as when the model was made.

        Raises:
            ValueError: A parameter was replaced, or is a parameter of another rank.
        """
        self.replicas.check()
        self.ties.check()
        self.check_own((name.split('.', 2)[2], x) for name, x in self.replicas.named_parameters())

    def check_own(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Check that no parameter belongs to another rank, which would not get its gradient.

        Raises:
            ValueError: A parameter does.
        """
        for name, x in named:
            self._check_unused_one(x, f"'{name}'")

    def check_learning(
        self, learning: Mapping[int, tuple[Tensor, str]], own: Sequence[Tensor]
    ) -> None:
        """Check that each tensor with a gradient is known to all ranks that have it.

        Raises:
            RuntimeError: Another tensor gets gradients.
        """
        known = {*map(id, own)}
        for x, where in [each for number, each in learning.items() if number not in known]:
            self._check_unused_one(x, f'what {where} uses')
            if self.data.group is not None:
                raise RuntimeError(
                    f'{where} uses a tensor of shape {tuple(x.shape)} that requires grad, but is '
                    'no parameter of the model or of loss_fn, so that replicas do not add up its '
                    'gradients. Let the layer that uses it have it as a parameter, or give a '
                    'module as loss_fn'
                )

    def together(self, task: str, function: Callable[[], Facts | None]) -> dict[int, Facts]:
        """Call a function on all ranks, and return the facts of each."""
        return together(task, function, self.everyone, self.device)

    def draw_alike(self) -> None:
        """Copy the generator state of the first rank to all ranks that share layers with it.

        Then dropout agrees on activations that are not split, because each of them has these.
        """
        if self.tensor.group is not None:
            states = rng_states([self.device])
            for state in states.values():
                there = state.to(self.device)
                dist.broadcast(there, self.tensor.ranks[0], self.tensor.group)
                state.copy_(there)
            set_rng_states([self.device], states)

    def sum(self, said: Mapping[int, Facts]) -> float:
        """Return the sum of the replicas' counts; all shards of a layer have the same count."""
        return sum(each.counted for rank, each in said.items() if rank in self.alike)


def other_model(
    first: int,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    rank: int,
    others: Sequence[tuple[str, tuple[int, ...]]],
) -> ValueError:
    """Return the error for ranks with other models."""
    name, shape = min({*tensors} ^ {*others})
    owner = first if (name, shape) in tensors else rank
    return ValueError(
        f'ranks {first} and {rank} have other models: only rank {owner} has '
        f"'{name}' of shape {shape}. Make the same module on all ranks; if its "
        'forward loops over a set and is converted, let it loop over sorted(…)'
    )


def other_tensors(
    first: int,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    rank: int,
    others: Sequence[tuple[str, tuple[int, ...]]],
) -> ValueError:
    """Return the error for two ranks with the same stages, but other tensors in them."""
    apart = sorted({*tensors} ^ {*others})
    if apart:
        name, shape = apart[0]
        owner = first if apart[0] in tensors else rank
        return ValueError(
            f'ranks {first} and {rank} have the same stages, but only rank {owner} '
            f"has '{name}' of shape {shape}: make the same module on all ranks, "
            'with the same sizes'
        )
    one, other = next(
        (one, other) for (one, _), (other, _) in zip(tensors, others) if one != other
    )
    return ValueError(
        "data='shard' exchanges parameters in the order in which modules register "
        f"them, but '{one}' of rank {first} has the place of '{other}' of rank "
        f'{rank}: register them in a loop over a list or sorted(…), not over a set, '
        "or choose data='replicate'"
    )


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in an attribute of a module."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, frozenset, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth - 1)


def _skips_of(layer: nn.Module) -> list[Any]:
    """Return the skips that a layer stashes and pops."""
    return [
        ([*each.stashable()], [*each.poppable()])
        for each in layer.modules()
        if isinstance(each, Skippable)
    ]


def _parse_places(places: Sequence[int] | None, stages: int, ranks: int) -> list[int]:
    """Return the rank of each stage."""
    found = [j % ranks for j in range(stages)] if places is None else [*places]
    if len(found) != stages or {*found} != {*range(ranks)}:
        raise ValueError(
            f'each of {ranks} ranks along the pipe axis takes at least one of '
            f'{stages} stages, but places are {found}; give the balance a number for '
            'each stage'
        )
    return found
