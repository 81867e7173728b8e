"""One rank: its place in the mesh, its layers and their execution.

A rank is made in three phases, each of which all ranks begin and end together::

    describe    the whole model, on the meta device: ties, skips, experts        same on all ranks
    build       the layers of this rank: values, shards, units of FSDP           on each rank alone
    connect     groups for messages, copies of tied parameters, replicas         with other ranks
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from torchgpipe.base.devices import CPU, is_cpu, rng_states, set_rng_states
from torchgpipe.base.structure import Gradients
from torchgpipe.distributed.agreement import AnyFacts, Facts, digest
from torchgpipe.distributed.comparison import (
    BitwiseComparison,
    Shared,
    difference,
    raise_differences,
)
from torchgpipe.distributed.layers import Values, fill, split_layer
from torchgpipe.distributed.mesh import Edges, MeshInfo, groups_of_edges, take_first
from torchgpipe.distributed.placement import Placement
from torchgpipe.distributed.replicas import Replicas
from torchgpipe.distributed.ties import Tie, Ties, owners_of, tie_again, ties_of
from torchgpipe.distributed.units import Unit, group_stages
from torchgpipe.engine.cell import Sequential
from torchgpipe.engine.partition import Engine, named_slots, shared_in
from torchgpipe.model.materialize import seeded
from torchgpipe.schedule.messages import edges
from torchgpipe.shard.collectives import F, agree, gathered
from torchgpipe.shard.digests import differing, digests_of
from torchgpipe.shard.nn.experts import Experts
from torchgpipe.shard.sums import local, split_axes
from torchgpipe.skip.layout import SkipLayout, inspect_skip_layout
from torchgpipe.skip.skippable import Skippable

#: Attributes that all modules have.
_OF_MODULES = {*vars(nn.Module())}


@dataclass(frozen=True)
class Description:
    """A model, as all ranks know it before they build their layers."""

    #: The tensors in several places.
    ties: Sequence[Tie]
    skips: SkipLayout
    #: The pairs of stages of which the first one stashes a skip for the second one.
    skip_edges: Sequence[tuple[int, int]]
    #: The names of all parameters.
    parameters: frozenset[str]
    has_experts: bool

    @classmethod
    def of(cls, skeleton: nn.Sequential, stages: Sequence[Sequence[str]]) -> 'Description':
        """Return the description of a model.

        Shared tensors are detected while the layers are as the user made them.

        Raises:
            TypeError: Skips do not match.
        """
        partitions = []
        for names in stages:
            layers = [(name, skeleton.get_submodule(name)) for name in names]
            partitions.append(nn.Sequential(OrderedDict(layers)))
        skips = inspect_skip_layout(partitions)
        skip_edges = set()
        for j in range(len(stages)):
            for prev_j, _ in skips.incoming(j):
                skip_edges.add((prev_j, j))
        named = skeleton.named_parameters(remove_duplicate=False)
        return cls(
            ties_of(skeleton, stages),
            skips,
            sorted(skip_edges),
            frozenset(name for name, _ in named),
            any(isinstance(module, Experts) for module in skeleton.modules()),
        )


class Rank:
    """One rank of a mesh.

    Attributes:
        stages: The names of the layers of each stage.
        ranks: The rank of each stage in this replica, among all processes.
        layers: Its layers, by name.
        partitions: The layers of each stage; stages of other ranks are empty.
        units: If FSDP splits parameters, the unit of each stage of this rank.
        ties: The parameters that other ranks also have.
        replicas: The parameters, and the reduction of their gradients.
        engine: Runs the layers. It has all stages.
        replaced: The names of layers that were replaced since the last step.
        saving: The last checkpoint that was not waited for.

    Raises:
        ValueError: The mesh or the places do not fit.
    """

    description: Description
    layers: dict[str, nn.Module]
    edges: Edges
    ties: Ties
    replicas: Replicas
    engine: Engine
    _ties_type = Ties
    _replicas_type = Replicas

    def __init__(
        self, mesh: MeshInfo, placement: Placement, stages: Sequence[Sequence[str]]
    ) -> None:
        self.mesh = mesh
        self.placement = placement
        self.stages = stages
        self.ranks = [mesh.pipe.ranks[place] for place in placement.places]
        self.partitions = [Sequential() for _ in stages]
        self.units: dict[int, Unit] = {}
        self.replaced: list[str] = []
        self.saving: Any = None
        #: The parameters of the module that this rank does not use, by ``id``: layers of other
        #: ranks have them, or other values took their place. An ``id`` may be reused.
        self._unused: dict[int, tuple[str, weakref.ref[Tensor]]] = {}

    @property
    def devices(self) -> list[torch.device]:
        """The devices of this rank, whose generators are saved."""
        return [self.mesh.device]

    @property
    def number(self) -> int:
        """The number of this rank among all processes."""
        return self.mesh.pipe.ranks[self.mesh.pipe.rank]

    @property
    def local_stages(self) -> list[int]:
        """The stages of this rank."""
        return self.stages_of(self.mesh.pipe.rank)

    def stages_of(self, place: int) -> list[int]:
        """Return the stages of a rank along the pipe axis."""
        return [j for j, owner in enumerate(self.placement.places) if owner == place]

    @property
    def is_first(self) -> bool:
        """Whether it has the first stage."""
        return self.placement.places[0] == self.mesh.pipe.rank

    @property
    def is_last(self) -> bool:
        """Whether it has the last stage."""
        return self.placement.places[-1] == self.mesh.pipe.rank

    @property
    def ranks_with_last(self) -> list[int]:
        """The ranks with the last stage, of all replicas."""
        return sorted(self.mesh.same_stages[self.placement.places[-1]])

    @property
    def exchanges_samples(self) -> bool:
        """Whether replicas exchange samples: the model has experts."""
        return self.description.has_experts and self.mesh.data.size > 1

    @property
    def gathers_again(self) -> bool:
        """Whether ranks free parameters of stages, and gather them again, within a step."""
        return bool(self.units) and self.placement.gathers_again

    def agree(self, task: str, function: Callable[[], F], default: F) -> dict[int, F]:
        """Call a function on all ranks, and return the facts of each: see :func:`agree`."""
        return agree(task, function, default, self.mesh.facts, self.mesh.device)

    # The making of a rank.

    def make(self, model: Any, skeleton: nn.Sequential, values: Values) -> None:
        """Make the layers of this rank.

        Args:
            model: The module, or functions that make its layers.
            skeleton: The module, or the layers on the meta device.
        """
        self._check_skeleton(skeleton)
        self.description = Description.of(skeleton, self.stages)
        parameters = [] if model is not skeleton else [*skeleton.named_parameters()]
        build = partial(self._build, model, skeleton, values)
        self._check_registered(self.agree('this model', build, Facts()))
        self._connect()
        in_use = {id(x) for layer in self.layers.values() for x in layer.parameters()}
        for name, x in parameters:
            if id(x) not in in_use:
                self._unused[id(x)] = name, weakref.ref(x)
        self.agree('this model', self._check_unused, Facts())

    def _check_skeleton(self, skeleton: nn.Module) -> None:
        """Check that all ranks have the same model: also the layers of other ranks.

        Raises:
            ValueError: Their layers have other tensors.
        """
        saved = skeleton.state_dict().keys()
        tensors = []
        for name, _, x in named_slots(skeleton):
            if name in saved:
                tensors.append((name, tuple(x.shape)))
        tensors.sort()
        facts = self.agree('this model', lambda: Facts(state=digest(tensors)), Facts())
        if len({fact.state for fact in facts.values()}) > 1:
            assert self.mesh.everyone is not None
            first = next(iter(facts))
            by_rank = dict(zip(facts, gathered(tensors, self.mesh.everyone)))
            for rank in facts:
                if by_rank[rank] != by_rank[first]:
                    raise other_model(first, by_rank[first], rank, by_rank[rank])

    def _build(self, model: Any, skeleton: nn.Sequential, values: Values) -> Facts:
        """Build the layers of this rank: fill them with values, and split them over ranks."""
        local_names = [name for j in self.local_stages for name in self.stages[j]]
        shared = []
        with_values = set()
        modules = {}
        if model is skeleton:
            shared = shared_in({name: skeleton.get_submodule(name) for name in local_names})
            with_values = {name for name in local_names if _has_values(model.get_submodule(name))}
        for j in self.local_stages:
            modules[j] = nn.ModuleList(map(skeleton.get_submodule, self.stages[j]))
        late = self._stages_with_ties()
        finish = partial(self._finish_layer, with_values, {})

        layers: dict[str, nn.Module] = {}
        # The device has the layers of one group at once.
        for group in group_stages(modules, late):
            names = [name for j in group for name in self.stages[j]]
            layers.update(self._fill(model, skeleton, names, values, finish))
            tie_again(shared, layers)
            self._fill_partitions(group, layers)
            if self._has_units:
                unit = self._make_unit(group, reduces_at_end=not late.isdisjoint(group))
                self.units.update(dict.fromkeys(group, unit))
            if values.loader is not None:
                # Parameters are split now, so each rank reads its parts of them. FSDP takes the
                # new shards when it gathers them for the first time.
                device = CPU if self.placement.offloads else self.mesh.device
                values.loader.load((name, layers[name], device) for name in names)
        self.layers = {name: layers[name] for name in local_names}
        return Facts(state=digest(self._registered()))

    def _fill(
        self,
        model: Any,
        skeleton: nn.Sequential,
        names: Sequence[str],
        values: Values,
        finish: Callable[[str, nn.Module], None],
    ) -> Mapping[str, nn.Module]:
        """Return some layers with their values: see :func:`fill`."""
        return fill(model, skeleton, names, self.mesh.device, values, finish)

    def _finish_layer(
        self,
        with_values: set[str],
        split: dict[nn.Module, tuple[str, str]],
        name: str,
        layer: nn.Module,
    ) -> None:
        """Split a layer over ranks; one with values first gets the values of the first ranks."""
        if name in with_values:
            for axis in (self.mesh.data, self.mesh.tensor):
                take_first(layer, axis)
        split_layer(name, layer, self.placement.tensor_plan, self.mesh.tensor.mesh, split)
        if self.mesh.data.mesh is not None:
            for module in layer.modules():
                if isinstance(module, Experts) and not module.communicates:
                    module.spread(self.mesh.data.mesh)

    def _fill_partitions(self, stages: Iterable[int], layers: Mapping[str, nn.Module]) -> None:
        for j in stages:
            for name in self.stages[j]:
                self.partitions[j]._modules[name] = layers[name]

    def _stages_with_ties(self) -> set[int]:
        """Return the stages of this rank with a parameter of which other ranks have a copy."""
        stages = set()
        for tie in self.description.ties:
            if len(owners_of(tie, self.ranks)) > 1:
                for j, name in tie:
                    if name in self.description.parameters:
                        stages.add(j)
        return stages.intersection(self.local_stages)

    @property
    def _has_units(self) -> bool:
        """Whether FSDP splits the parameters; with a policy, also over one rank."""
        is_split = self.mesh.data.group is not None or bool(self.placement.policies)
        return self.placement.data == 'shard' and is_split

    def _make_unit(self, stages: Sequence[int], reduces_at_end: bool) -> Unit:
        """Split the parameters of some stages over replicas."""
        options = {'mesh': self.mesh.data.mesh, **self.placement.policies}
        if self.placement.policies:
            options['mesh'] = self.mesh.mesh['data']
        if self.placement.offloads and is_cpu(self.mesh.device):
            # Pinned memory is of no use if the device is the host.
            options['offload_policy'] = CPUOffloadPolicy(pin_memory=False)
        layers = [self.partitions[j] for j in stages]
        spread = set()
        for layer in layers:
            for x in layer.parameters():
                if self.mesh.data.name in split_axes(x):
                    spread.add(x)
        return Unit(layers, spread, reduces_at_end, options)

    def _registered(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the parameters and saved buffers of this rank.

        FSDP exchanges parameters in the order in which modules register them. All else is
        exchanged in the order of names.
        """
        tensors = []
        for layer, module in self.layers.items():
            saved = module.state_dict(prefix=f'{layer}.').keys()
            for name, _, x in named_slots(module, layer):
                if name in saved:
                    tensors.append((name, tuple(x.shape)))
        return tensors if self.units else sorted(tensors)

    def _check_registered(self, facts: Mapping[int, Facts]) -> None:
        """Check that ranks with the same stages can exchange their tensors.

        Raises:
            ValueError: They have other tensors, or FSDP would exchange them in another order.
        """
        states = [{facts[rank].state for rank in ranks} for ranks in self.mesh.same_stages]
        if max(map(len, states)) == 1:
            return
        assert self.mesh.everyone is not None
        registered = dict(zip(facts, gathered(self._registered(), self.mesh.everyone)))
        for ranks in self.mesh.same_stages:
            first = min(ranks)
            for rank in sorted(ranks):
                if registered[rank] != registered[first]:
                    raise other_tensors(first, registered[first], rank, registered[rank])

    def _connect(self) -> None:
        """Connect the layers of this rank with the ones of other ranks."""
        pairs = edges(self.placement.places, self.description.skip_edges)
        self.edges = groups_of_edges(self.mesh.mesh, pairs)
        self._assemble()
        self.ties.spread(self.mesh.device)

    def _assemble(self) -> None:
        """Build partitions, ties, replicas and engine for the current layers."""
        self._fill_partitions(self.local_stages, self.layers)
        pipe = self.mesh.pipe
        self.ties = self._ties_type(
            self.layers, self.description.ties, self.ranks, pipe.group, self.number
        )
        stages = {j: self.partitions[j] for j in self.local_stages}
        dtype = self.placement.precision.reduce_dtype
        self.replicas = self._replicas_type(
            stages, self.mesh.data, self.units, self.ties.ids, dtype
        )
        devices = [self.mesh.device] * len(self.partitions)
        self.engine = Engine(self.partitions, devices, self.description.skips)

    # Copies and replacements.

    def copied(self, layers: dict[str, Any]) -> 'Rank':
        """Return the same rank with copies of its layers; process groups are shared."""
        if self.units:
            raise TypeError(
                "parameters that are spread over replicas (data='shard') cannot be "
                'copied with their model: save(folder), and load it into another one'
            )
        new = copy(self)
        new.layers = layers
        new.replaced = [*self.replaced]
        new.saving = None
        new.partitions = [Sequential() for _ in new.partitions]
        new._assemble()
        new.replicas.copy_waiting(self.replicas)
        return new

    def replace(self, layers: Mapping[str, Any]) -> None:
        """Replace some layers; the new ones get the values of the first replica.

        Raises:
            ValueError: A layer is on another rank, or one that other ranks share or have parts of.
        """
        tied = {name.partition('.')[0] for tie in self.description.ties for _, name in tie}
        is_split = bool(self.units) or self.mesh.tensor.mesh is not None
        for name, layer in layers.items():
            if name not in self.layers:
                raise ValueError(f"layer '{name}' is on another rank; replace it there")
            if not isinstance(layer, nn.Module):
                raise ValueError(f"layer '{name}' is {layer}")
            if is_split or name in tied or _skips_of(layer) != _skips_of(self.layers[name]):
                raise ValueError(
                    f"layer '{name}' has parameters or skips that other ranks share "
                    'or have parts of, so it cannot be replaced on one of them: '
                    'replace it in the module, and make the model of that'
                )
        for name, layer in layers.items():
            self.layers[name] = layer.to(self.mesh.device)
        before = self.replicas
        self._assemble()
        self.replicas.syncs = before.syncs
        self.replicas.records = before.records
        self.replaced += layers

    def state_of_layers(self, *more: object) -> int:
        """Return a digest of the state that ranks with the same stages share, except values."""
        forms = []
        for name in self.replaced:
            for key, x in self.layers[name].state_dict().items():
                form = (x.shape, x.dtype) if isinstance(x, Tensor) else None
                forms.append((name, key, form))
        return digest(more, forms)

    def check_states(self, facts: Mapping[int, AnyFacts]) -> None:
        """Copy the values of the first replica to replaced layers, after a check on all ranks.

        Raises:
            RuntimeError: Replicas have different layers, or the same layers in different states.
        """
        for ranks in self.mesh.same_stages:
            if len({facts[rank].state for rank in ranks}) > 1:
                raise RuntimeError(
                    f'ranks {sorted(ranks)} have the same stages, but not in the same state: some '
                    'have replaced others of their layers than the rest, or by layers of other '
                    'shapes; or modes (train, eval), parameters that require grad, or autocast '
                    'differ. Do the same on all of them'
                )
        for name in self.replaced:
            take_first(self.layers[name], self.mesh.data)
        self.replaced = []

    def apply(self, function: Callable[[nn.Module], None], seed: int) -> None:
        """Apply a function to all modules, with the random numbers of (seed, layer) on each rank.

        Raises:
            RuntimeError: It draws values for tensors of which ranks have parts.
        """

        def run() -> Facts:
            names = [name for stage in self.stages for name in stage]
            for name, layer in self.layers.items():
                has_parts = any(isinstance(x, DTensor) for x in layer.parameters())
                with seeded(seed, names.index(name), self.mesh.device) as drew:
                    layer.apply(function)
                if has_parts and drew():
                    raise RuntimeError(
                        f"apply has drawn random numbers for layer '{name}', of which ranks have "
                        'parts, so they would differ from one process; give the model the '
                        'function when it is made: init=function'
                    )
            return Facts()

        self.agree('apply', run, Facts())
        self.ties.spread(self.mesh.device)

    # Comparisons.

    def comparison(self, losses: Iterable[object] = ()) -> BitwiseComparison:
        """Return a comparison of the tensors that other ranks may share.

        Tensors of replaced layers are left out, because they get the values of the first replica.

        Args:
            losses: The loss on a rank with the last stage, which may be a module.
        """
        first_names = {id(copy.value): copy.name for copy in self.ties.copies}
        modules = [(name, x) for name, x in self.layers.items() if name not in self.replaced]
        for module in losses:
            if isinstance(module, nn.Module):
                modules.append(('loss_fn', module))
        tensors: dict[int, Shared] = {}
        for prefix, module in modules:
            saved = module.state_dict(prefix=f'{prefix}.').keys()
            for name, (owner, key), x in named_slots(module, prefix):
                axes = {'data', 'tensor'} - split_axes(x)
                first_name = first_names.get(id(x), name)
                shared = Shared(first_name, owner, key, axes, name not in saved)
                tensors.setdefault(id(x), shared)

        owners = {}
        for tie in self.description.ties:
            ranks = owners_of(tie, self.ranks)
            if len(ranks) > 1:
                owners[tie[0][1]] = ranks
        copies = {}
        for tied in self.ties.copies:
            copies[tied.name] = Shared(tied.name, tied.module, tied.key, ('pipe',))
        by_name = sorted(tensors.values(), key=lambda shared: shared.name)
        return BitwiseComparison(self.mesh, by_name, owners, copies)

    def compare_gradients(self, gradients: Gradients) -> None:
        """Compare the gradients of parameters that ranks along the tensor axis have whole.

        Raises:
            RuntimeError: A gradient differs, such as that of a norm of heads, of which each rank
                has some.
        """
        tensor = self.mesh.tensor
        if tensor.group is None:
            return
        assert self.mesh.everyone is not None
        by_id = {id(x): gradient for x, gradient in gradients}
        whole: dict[str, Tensor | None] = {}
        for record in self.replicas.records:
            x = record.tensor
            if record.unit >= 0 and x.requires_grad and not isinstance(x, DTensor):
                gradient = by_id.get(id(x))
                whole[record.name] = None if gradient is None else local(gradient)
        texts = []
        different = differing(digests_of(whole), tensor.group, self.mesh.device)
        if different:
            texts.append(difference(different, tensor.ranks, 'tensor', 'the gradient of '))
        raise_differences(texts, self.mesh.everyone)

    # Checks.

    def check(self, parameters: Iterable[Tensor | None]) -> None:
        """Check that the parameters of this rank are the same as when the model was made.

        Args:
            parameters: The parameters of all its layers.

        Raises:
            ValueError: A parameter was replaced, or is a parameter of another rank.
        """
        self.replicas.check()
        self.ties.check()
        # Names take several times as long, and only an error has them.
        if not self._unused.keys().isdisjoint(map(id, parameters)):
            for name, layer in self.layers.items():
                self.check_used(layer, name)

    def check_used(self, module: nn.Module, prefix: str) -> None:
        """Check that no parameter of a module belongs to another rank, without a gradient here.

        Raises:
            ValueError: A parameter does.
        """
        for name, x in module.named_parameters(prefix):
            self._check_used(x, f"'{name}'")

    def _check_unused(self) -> Facts:
        """Check that no layer keeps parameters that took another form, and none had hooks.

        Raises:
            ValueError: A layer keeps one, or one had hooks.
        """
        for name, layer in self.layers.items():
            for path, module in layer.named_modules(prefix=name):
                for key, value in vars(module).items():
                    if key in _OF_MODULES:
                        continue
                    for x in _tensors_in(value):
                        self._check_used(x, f"'{path}.{key}'")
        for name, reference in self._unused.values():
            hooked = reference()
            if hooked is None or name.partition('.')[0] not in self.layers:
                continue
            if hooked._backward_hooks:
                raise ValueError(
                    f"'{name}' has a hook, but another tensor took its place, on a "
                    'device or in parts: register hooks on model.get_parameter(name)'
                )
        return Facts()

    def _check_used(self, x: Any, where: str) -> None:
        name, reference = self._unused.get(id(x), ('', None))
        if reference is not None and reference() is x:
            raise ValueError(
                f"{where} is or has '{name}', a parameter of a layer on another rank "
                'or one that took another form, so it would not change any more. Let '
                'the layer have it as a parameter (then it is tied), or put both '
                'layers on one rank'
            )

    def check_learning(
        self, learning: Mapping[int, tuple[Tensor, str]], inputs: Iterable[Tensor]
    ) -> None:
        """Check that each tensor with a gradient is known to all ranks that have it.

        Args:
            learning: By ``id``, tensors that get gradients, and the layers that use them.
            inputs: The tensors of the target.

        Raises:
            RuntimeError: Another tensor gets gradients.
        """
        ids_of_inputs = {*map(id, inputs)}
        for x, where in learning.values():
            if id(x) in ids_of_inputs or self.replicas.records.of(x) is not None:
                continue
            self._check_used(x, f'a tensor that {where} uses')
            if self.mesh.data.group is not None:
                raise RuntimeError(
                    f'{where} uses a tensor of shape {tuple(x.shape)} that requires grad, but is '
                    'no parameter of the model or of loss_fn, so that replicas do not add up its '
                    'gradients. Let the layer that uses it have it as a parameter, or give a '
                    'module as loss_fn'
                )

    # Random numbers and sums.

    def share_generator(self) -> None:
        """Copy the generator state of the first rank to all ranks that share layers with it.

        Then dropout agrees on activations that are not split, because each of them has these.
        """
        tensor = self.mesh.tensor
        if tensor.group is None:
            return
        states = rng_states([self.mesh.device])
        for state in states.values():
            on_device = state.to(self.mesh.device)
            dist.broadcast(on_device, tensor.ranks[0], tensor.group)
            state.copy_(on_device)
        set_rng_states([self.mesh.device], states)

    def sum(self, facts: Mapping[int, Any], name: str) -> float:
        """Return the sum of the replicas' facts; all shards of a layer have the same ones."""
        total = 0.0
        for rank in facts:
            if rank in self.mesh.same_shard:
                total += getattr(facts[rank], name)
        return total


def _has_values(layer: nn.Module) -> bool:
    """Return whether no tensor of a layer is on the meta device."""
    return not any(x.is_meta for x in (*layer.parameters(), *layer.buffers()))


def other_model(
    first: int,
    of_first: Sequence[tuple[str, tuple[int, ...]]],
    rank: int,
    of_rank: Sequence[tuple[str, tuple[int, ...]]],
) -> ValueError:
    """Return the error for ranks with other models."""
    name, shape = min({*of_first} ^ {*of_rank})
    owner = first if (name, shape) in of_first else rank
    return ValueError(
        f'ranks {first} and {rank} have other models: only rank {owner} has '
        f"'{name}' of shape {shape}. Make the same module on all ranks; if its "
        'forward loops over a set and is converted, let it loop over sorted(…)'
    )


def other_tensors(
    first: int,
    of_first: Sequence[tuple[str, tuple[int, ...]]],
    rank: int,
    of_rank: Sequence[tuple[str, tuple[int, ...]]],
) -> ValueError:
    """Return the error for two ranks with the same stages, but other tensors in them."""
    apart = sorted({*of_first} ^ {*of_rank})
    if apart:
        name, shape = apart[0]
        owner = first if apart[0] in of_first else rank
        return ValueError(
            f'ranks {first} and {rank} have the same stages, but only rank {owner} '
            f"has '{name}' of shape {shape}: make the same module on all ranks, "
            'with the same sizes'
        )
    pairs = zip(of_first, of_rank)
    (one, _), (other, _) = next(pair for pair in pairs if pair[0] != pair[1])
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
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _tensors_in(item, depth - 1)


def _skips_of(layer: nn.Module) -> list[Any]:
    """Return the skips that a layer stashes and pops."""
    skips = []
    for module in layer.modules():
        if isinstance(module, Skippable):
            skips.append(([*module.stashable()], [*module.poppable()]))
    return skips
