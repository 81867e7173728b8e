"""What one rank has: its place in the mesh, its layers, and what runs them."""
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.devices import rng_states, set_rng_states
from torchgpipe.distributed.layers import check_statistics, fill, shared_in, ties_of
from torchgpipe.distributed.mesh import alike, axis_of, device_of, whole_group
from torchgpipe.distributed.replicas import Replicas, take_first
from torchgpipe.distributed.start import Facts, together
from torchgpipe.distributed.tensor import split_layer, tie_again
from torchgpipe.distributed.ties import Ties
from torchgpipe.engine.cell import Sequential
from torchgpipe.engine.partition import Engine
from torchgpipe.shard.nn.experts import Experts
from torchgpipe.skip.layout import inspect_skip_layout
from torchgpipe.weights import Weights

__all__ = ['Rank']


class Rank:
    """One rank of a mesh.

    Args:
        mesh: The mesh.
        places: The rank along the pipe axis of each stage; by default they take turns.
        stages: The names of the layers of each stage.

    Attributes:
        data, pipe, tensor: The axes.
        everyone: The group of all ranks.
        last: The ranks with the last stage.
        alike: The ranks that have the same shards of layers, or those of other stages.
        device: That of this rank.
        places: The rank of each stage along the pipe axis.
        ranks: The rank of each stage in this replica, among all processes.
        own: The stages of this rank.
        made: Its layers, by name.
        engine: What runs them; it has all stages, those of other ranks without layers.
        skips: The pairs of stages between which skips go.
        exchanges: Whether replicas exchange samples: the model has experts.
        ties: The parameters that other ranks have, too.
        replicas: The stages, and what becomes of their gradients.
        files: The group of all ranks for checkpoints, when there has been one.
        saving: The last checkpoint that was not waited for.

    Raises:
        ValueError: The mesh or the places do not fit.
    """

    made: 'OrderedDict[str, nn.Module]'
    engine: Engine
    exchanges: bool
    ties: Ties
    replicas: Replicas

    def __init__(self, mesh: DeviceMesh, places: Sequence[int] | None,
                 stages: Sequence[Sequence[str]]) -> None:
        self.data, self.pipe, self.tensor = (
            axis_of(mesh, name) for name in ('data', 'pipe', 'tensor'))
        self.everyone, self.alike = whole_group(mesh), alike(mesh, 'tensor')
        self.device = device_of(mesh)
        self.places = _parse_places(places, len(stages), self.pipe.size)
        self.ranks = [self.pipe.ranks[place] for place in self.places]
        self.last = alike(mesh, 'pipe', self.places[-1])
        self._stages = stages
        self.own = [j for j, place in enumerate(self.places) if place == self.pipe.rank]
        self.skips: frozenset[tuple[int, int]] = frozenset()
        self.files: dist.ProcessGroup | None = None
        self.saving: Any = None

    @property
    def is_first(self) -> bool:
        """Whether it has the first stage."""
        return self.places[0] == self.pipe.rank

    @property
    def is_last(self) -> bool:
        """Whether it has the last stage."""
        return self.places[-1] == self.pipe.rank

    def make(self, model: Any, skeleton: nn.Sequential, seed: int, weights: Weights | None,
             plan: Mapping[str, Any], data: str) -> None:
        """Make the layers of this rank.

        Args:
            model: The model, or functions that make its layers.
            skeleton: Its layers.
            seed: Where initial values come from.
            weights: The values of all layers, if there are some.
            plan: How layers are split along the tensor axis.
            data: What ranks along the data axis do with parameters.
        """
        stages, own = self._stages, self.own
        check_statistics(skeleton, stages, self.ranks)
        self.exchanges = self.data.size > 1 and any(
            isinstance(module, Experts) for module in skeleton.modules())
        # What layers share is seen while they are what the user made of them.
        ties = ties_of(skeleton, stages)
        layout = inspect_skip_layout([
            nn.Sequential(OrderedDict((name, skeleton.get_submodule(name)) for name in names))
            for names in stages])
        self.skips = frozenset((prev_j, j) for j in range(len(stages))
                               for prev_j, _ in layout.incoming(j))
        with_values = {name for name, layer in skeleton.named_children() if model is skeleton
                       and not any(x.is_meta for x in (*layer.parameters(), *layer.buffers()))}

        def finish(name: str, layer: nn.Module) -> None:
            if name in with_values:
                for axis in (self.data, self.tensor):
                    take_first(layer, axis)
            split_layer(name, layer, plan, self.tensor.mesh)
            if self.data.mesh is not None:
                for module in layer.modules():
                    if isinstance(module, Experts) and not module.communicates:
                        module.spread(self.data.mesh)

        shared = shared_in({name: skeleton.get_submodule(name) for j in own
                            for name in stages[j]}) if model is skeleton else []
        self.made = made = fill(model, skeleton, [name for j in own for name in stages[j]],
                                self.device, seed, weights, finish)
        tie_again(shared)
        partitions = [Sequential(OrderedDict((name, made[name]) for name in names)
                                 if j in own else OrderedDict())
                      for j, names in enumerate(stages)]
        self.ties = Ties(nn.ModuleDict(made), ties, self.ranks, self.pipe.group)
        self.ties.spread()
        self.replicas = Replicas([partitions[j] for j in own], self.data, data)
        self.engine = Engine(partitions, [self.device] * len(stages), layout)

    def together(self, what: str, function: Callable[[], Facts]) -> dict[int, Facts]:
        """Call a function on all ranks, and return what each says: see `start`."""
        return together(what, function, self.everyone, self.device)

    def draw_alike(self) -> None:
        """Let ranks that share layers draw the same numbers from now on: those of the first one.

        What is not split of an activation, each of them has, and drops.
        """
        if self.tensor.group is not None:
            states = rng_states([self.device])
            for state in states.values():
                there = state.to(self.device)
                dist.broadcast(there, self.tensor.ranks[0], self.tensor.group)
                state.copy_(there)
            set_rng_states([self.device], states)

    def sum(self, said: Mapping[int, Facts]) -> float:
        """Return what replicas have counted; all shards of a layer have counted the same."""
        return sum(each.counted for rank, each in said.items() if rank in self.alike)


def _parse_places(places: Sequence[int] | None, stages: int, ranks: int) -> list[int]:
    """Return the rank of each stage."""
    found = [j % ranks for j in range(stages)] if places is None else [*places]
    if len(found) != stages or {*found} != {*range(ranks)}:
        raise ValueError(f'each of {ranks} ranks along the pipe axis takes at least one of '
                         f'{stages} stages, but places are {found}; give the balance a number for '
                         'each stage')
    return found
