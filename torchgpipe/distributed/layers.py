"""The layers of one rank: created on it alone, split over ranks by names, or tied to others.

::

    stages       0         1         2         3          on ranks 0, 1, 0, 1 of the pipeline
    layers       0 1       2 3       4         5
    rank 0       0 1                 4                    one by one: layer i from (seed, i),
    rank 1                 2 3                 5          then cut into shards, then the next one

A tied tensor, such as the weight of embedding and head, is in stages of several ranks
(:class:`Ties`). Each of these ranks has its own copy, which starts with the value in the first
stage. In each step, each copy gets the sum of all gradients, so all copies stay equal to a single
tensor::

    stage 0, rank 0      gradient ◀── gradient of rank 3
                           └─ sum ──▶ rank 3
    stage 3, rank 3      gradient ──▶ rank 0,  sum ◀── rank 0
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from torchgpipe.base.structure import Gradients
from torchgpipe.engine.partition import named_slots
from torchgpipe.model.materialize import materialize, seeded
from torchgpipe.model.weights import Weights, open_weights
from torchgpipe.sequential.parts import to_own_names
from torchgpipe.shard.collectives import gathered
from torchgpipe.shard.parameter import sharded_parameters
from torchgpipe.shard.sums import like, local


def check_plan(plan: Mapping[str, Any], module: nn.Module, size: int) -> None:
    """Check that each line of a plan matches a module, and that a tensor axis has a plan.

    Raises:
        ValueError: A line matches no module, or there is no plan for several ranks.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f'tensor_plan names {pattern!r}, but no module is called that; '
                f'names like it: {get_close_matches(pattern, names, 5, 0.3)}'
            )
    if size > 1 and not plan:
        raise ValueError(
            f'the mesh has {size} ranks along its tensor axis, but tensor_plan says '
            "of no layer how it is split: tensor_plan={'*.linear': ColwiseParallel()}"
            ' of torch.distributed.tensor.parallel'
        )


def check_whole(module: nn.Module) -> None:
    """Check that a model has no layers of :mod:`torchgpipe.shard`, which have shards already.

    Raises:
        ValueError: A parameter is a shard: ranks would copy the first rank's, and save it as the
            whole parameter.
    """
    shards = sharded_parameters(module)
    if shards:
        name = next(iter(shards))
        owner = module.get_submodule(name.rpartition('.')[0])
        raise ValueError(
            f"'{name}' is a shard, of a {type(owner).__name__}, but a DistributedGPipe splits "
            'whole layers itself: give it nn.Linear or nn.Embedding in that place, and a style in '
            'tensor_plan: ColwiseParallel() for dim=1, RowwiseParallel() for dim=0. A model with '
            'layers of torchgpipe.shard runs in a GPipe on each rank'
        )


def split_layer(
    name: str,
    layer: nn.Module,
    plan: Mapping[str, Any],
    mesh: DeviceMesh | None,
    split: dict[nn.Module, tuple[str, str]],
) -> None:
    """Split a layer of a model as a plan says.

    Args:
        mesh: The ranks to split it over; ``None`` if there are no others.
        split: The name and the style by which each module was split. A module in several layers
            is split once.

    Raises:
        ValueError: A module has several names, and the plan has another style for each.
    """
    if mesh is None:
        return
    for path, module in [*layer.named_modules(prefix=name)]:
        style = style_of(path, plan)
        text = _text_of(style)
        if module not in split:
            split[module] = path, text
            if style is not None:
                parallelize_module(module, mesh, copy(style))  # It is changed.
        elif split[module][1] != text:
            raise split_apart(dict([split[module], (path, text)]))


def _text_of(style: Any) -> str:
    """Return a text that is the same for equal styles, which PyTorch does not compare."""
    if style is None:
        return 'whole'
    return f'{type(style).__name__} {vars(style)}'


def style_of(path: str, plan: Mapping[str, Any]) -> Any:
    """Return the style of a module in a plan, or ``None``."""
    return next((style for pattern, style in plan.items() if fnmatchcase(path, pattern)), None)


def layout_of(x: object) -> str:
    """Return a description of how a parameter is split."""
    return str(x.placements) if isinstance(x, DTensor) else 'whole'


def split_apart(layouts: Mapping[str, str]) -> ValueError:
    """Return the error for a parameter or module that is split in several ways, by its names."""
    return ValueError(
        'one tensor or module has several names, and tensor_plan splits it in '
        f'other ways there: {dict(layouts)}; give all of its names one style, as by '
        'one pattern'
    )


def tie_again(shared: Sequence[Sequence[str]], layers: Mapping[str, nn.Module]) -> None:
    """Tie parameters again that were split in each of their places.

    Raises:
        ValueError: A parameter was split in different ways.
    """
    for names in shared:
        places = [
            (full, *_place_of(full, layers)) for full in names if full.partition('.')[0] in layers
        ]
        tensors = [getattr(module, name) for _, module, name in places]
        layouts = {full: layout_of(x) for (full, _, _), x in zip(places, tensors)}
        if len({*layouts.values()}) > 1:
            raise split_apart(layouts)
        for _, module, name in places[1:]:
            setattr(module, name, tensors[0])


def _place_of(full: str, layers: Mapping[str, nn.Module]) -> tuple[nn.Module, str]:
    """Return the module of a tensor and the name in it."""
    path, _, name = full.rpartition('.')
    layer, _, rest = path.partition('.')
    return layers[layer].get_submodule(rest), name


#: A tensor in several places: the stage of each, and its name there; in the order of stages.
Tie = tuple[tuple[int, str], ...]


def skeleton_of(model: Any) -> nn.Sequential:
    """Return a model as a module; layers made by functions are on the meta device.

    Raises:
        TypeError: It is neither a module nor a list of functions.
    """
    if isinstance(model, nn.Module):
        return model  # type: ignore[return-value]
    functions = list(model) if isinstance(model, (list, tuple)) else []
    wrong = [each for each in functions if isinstance(each, nn.Module) or not callable(each)]
    if not functions or wrong:
        raise TypeError(
            'a model is an nn.Sequential, best on the meta device, or a list of '
            'functions of which each makes a layer, but this is a '
            f'{type(model).__name__}'
            + (f' with a {type(wrong[0]).__name__} in it' if wrong else '')
        )
    with torch.device('meta'):
        layers = [function() for function in functions]
    for k, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f'function {k} of the model gave a {type(layer).__name__}, but each '
                'has to make a layer, an nn.Module'
            )
    return nn.Sequential(*layers)


def fill(
    model: Any,
    skeleton: nn.Sequential,
    own: Sequence[str],
    device: torch.device,
    seed: int,
    weights: Weights | None,
    init: Callable[[nn.Module], Any] | None,
    finish: Callable[[str, nn.Module], None],
) -> 'OrderedDict[str, nn.Module]':
    """Return some layers of a model with their values.

    ``init`` is called with each module after it has its first values, and ``finish`` with each
    layer and its name before the next layer gets values.
    """
    numbers = {name: i for i, name in enumerate(skeleton._modules)}

    @contextmanager
    def around(name: str, layer: nn.Module) -> Iterator[None]:
        with seeded(seed, numbers[name]):
            yield
        layer.to(device)
        finish(name, layer)

    if isinstance(model, nn.Module):
        # A tensor that an earlier layer shares gets its values there, so that layer is also made.
        needed = [*dict.fromkeys([*_sources(skeleton, own), *own])]
        needed.sort(key=numbers.__getitem__)
        layers = OrderedDict((name, skeleton.get_submodule(name)) for name in needed)
        materialize(
            nn.Sequential(layers),
            [device] * len(needed),
            _part(weights, skeleton, needed),
            around,
            init,
        )
        return OrderedDict((name, layers[name]) for name in own)
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for name in own:
        with seeded(seed, numbers[name]):
            made[name] = model[numbers[name]]()
        materialize(
            nn.Sequential(OrderedDict([(name, made[name])])),
            [device],
            _part(weights, skeleton, [name]),
            around,
            init,
        )
    return made


class _Some(Mapping[str, Any]):
    """Some tensors of weights under other names, read on access."""

    def __init__(self, source: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names

    def __getitem__(self, key: str) -> Any:
        return self._source[self._names[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _part(
    weights: Weights | None, skeleton: nn.Sequential, own: Iterable[str]
) -> Mapping[str, Any] | None:
    """Return the weights of some layers, with the weights that belong to no layer at all."""
    if weights is None:
        return None
    source = open_weights(weights)
    others = {*skeleton._modules} - {*own}
    names = {key: key for key in source}
    to_own_names(names, '', skeleton._modules)
    # A tensor with several names needs only one of them, which may be on another rank.
    shared: dict[int, list[str]] = {}
    for full, _, x in named_slots(skeleton):
        shared.setdefault(id(x), []).append(full)
    for each in shared.values():
        found = next((names[full] for full in each if full in names), None)
        if found is not None and len(each) > 1:
            names.update({full: names.get(full, found) for full in each})
    return _Some(
        source, {name: key for name, key in names.items() if name.partition('.')[0] not in others}
    )


def _sources(skeleton: nn.Sequential, own: Iterable[str]) -> list[str]:
    """Return the first layer with each meta tensor of some layers."""
    first: dict[int, str] = {}
    for name, layer in skeleton.named_children():
        for _, _, tensor in named_slots(layer):
            first.setdefault(id(tensor), name)
    return [
        first[id(tensor)]
        for name in own
        for _, _, tensor in named_slots(skeleton.get_submodule(name))
        if tensor.is_meta
    ]


def shared_in(layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of each tensor that has several."""
    found: dict[int, list[str]] = {}
    for prefix, layer in layers.items():
        for full, _, x in named_slots(layer, prefix):
            found.setdefault(id(x), []).append(full)
    return [places for places in found.values() if len(places) > 1]


def ties_of(model: nn.Sequential, stages: Sequence[Iterable[str]]) -> list[Tie]:
    """Return the parameters and buffers that stand in several places of a model.

    Their order is the same on all ranks, because it depends on stages and names only.
    """
    owners = {name: j for j, names in enumerate(stages) for name in names}
    ties = []
    for names in shared_in({name: model.get_submodule(name) for name in owners}):
        ties.append(tuple(sorted((owners[full.partition('.')[0]], full) for full in names)))
    return sorted(ties)


class Ties:
    """The parameters and buffers of this rank that other ranks also have.

    Buffers are only compared: a layer that changes one makes ranks differ.

    Attributes:
        names: The names of this rank's copies, each with the name in the first stage.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        ties: Sequence[Tie],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        own: int | None = None,
    ) -> None:
        self._own = own = dist.get_rank() if own is None else own
        self._group = group
        #: The modules and names by which this rank has them, and all ranks that do.
        self._ties: list[tuple[nn.Module, str, list[int]]] = []
        #: By the name in the first stage, the name on this rank and the layout here.
        self._layouts: dict[str, tuple[str, str]] = {}
        self.names: dict[str, str] = {}
        #: The places of parameters and buffers, their names in the first stage, and how many
        #: other ranks have them, or -1 on all but the first.
        self._slots: list[tuple[nn.Module, str, str, int]] = []
        self._known: list[Any] = []
        for tie in ties:
            names = [name for j, name in tie if ranks[j] == own]
            owners = [*dict.fromkeys(ranks[j] for j, _ in tie)]
            if names and len(owners) > 1:
                module, name = _place_of(names[0], layers)
                first = tie[0][1]
                x = getattr(module, name)
                others = len(owners) - 1 if owners[0] == own else -1
                self._slots.append((module, name, first, others))
                if isinstance(x, nn.Parameter):
                    self._ties.append((module, name, owners))
                    self._layouts[first] = names[0], layout_of(x)
                    self.names.update(dict.fromkeys(names, first))

    @property
    def shared(self) -> dict[int, tuple[str, int]]:
        """The name and the number of other ranks of each tensor, by its number."""
        return {
            id(getattr(module, name, None)): (first, others)
            for module, name, first, others in self._slots
        }

    def remember(self) -> None:
        """Record the parameters with which the model is made."""
        self._known = [module._parameters[name] for module, name, _ in self._ties]

    def check(self) -> None:
        """Check that the parameters are the same as when the model was made.

        Raises:
            ValueError: A parameter was replaced, so it may not be tied any more.
        """
        for (module, name, ranks), x in zip(self._ties, self._known):
            if module._parameters.get(name) is not x:
                raise ValueError(
                    f"'{name}' of a {type(module).__name__}, which stages on ranks "
                    f'{ranks} share, was replaced after this model was made: change '
                    'its values in place, or replace it in the module before'
                )

    @torch.no_grad()
    def spread(self, device: torch.device) -> None:
        """Copy the values in the first stage to all copies.

        Args:
            device: The device of this rank, from which it sends; parameters may be on the host.

        Raises:
            ValueError: The copies are split in different ways.
        """
        self._check_layouts()
        for module, name, (first, *others) in self._ties:
            x = local(module._parameters[name])  # type: ignore[arg-type]
            if self._own == first:
                for rank in others:
                    self._send(x.contiguous().to(device), rank)
            else:
                value = torch.empty_like(x, device=device, memory_format=torch.contiguous_format)
                self._receive(value, first)
                x.copy_(value)

    def _check_layouts(self) -> None:
        if self._group is None:
            return
        found: list[dict[str, tuple[str, str]]] = gathered(self._layouts, self._group)
        for first in dict.fromkeys(key for each in found for key in each):
            layouts = dict(each[first] for each in found if first in each)
            if len({*layouts.values()}) > 1:
                raise split_apart(layouts)

    def together(self, gradients: Gradients) -> Gradients:
        """Return gradients, summed over all ranks for parameters that other ranks have.

        Raises:
            RuntimeError: A parameter is frozen on some of them.
        """
        own = self.numbers
        grads = {id(x): grad for x, grad in gradients if id(x) in own}
        found = [(x, grad) for x, grad in gradients if id(x) not in own]
        for module, name, ranks in self._ties:
            x = module._parameters[name]
            assert x is not None
            grad, there, learning = self._sum(x, grads.get(id(x)), ranks)
            if 0 < learning < len(ranks):
                raise RuntimeError(
                    f"'{name}' of a {type(module).__name__}, which stages on ranks {ranks} share, "
                    f'requires grad on {learning} of them; freeze it on all, or on none'
                )
            if there:
                found.append((x, grad))
        return found

    def _sum(
        self, x: Tensor, grad: Tensor | None, ranks: Sequence[int]
    ) -> tuple[Tensor, int, int]:
        """Return the sum of ranks' gradients, the number of gradients, and of trained copies.

        Gradients are added up in the order of ranks, and the first rank sends the sum to all.
        """
        result = like(x, grad).clone()
        said = local(result).new_tensor([grad is not None, x.requires_grad])
        total = torch.cat([local(result).reshape(-1), said])
        first, *others = ranks
        if self._own == first:
            for rank in others:
                part = torch.empty_like(total)
                self._receive(part, rank)
                total += part
            for rank in others:
                self._send(total, rank)
        else:
            self._send(total, first)
            self._receive(total, first)
        local(result).copy_(total[:-2].view_as(local(result)))
        there, learning = self._counts_in(total[-2:], len(ranks))
        return result, int(there), int(learning)

    def _send(self, x: Tensor, rank: int) -> None:
        dist.send(x, rank, self._group)

    def _receive(self, x: Tensor, rank: int) -> None:
        dist.recv(x, rank, self._group)

    def _counts_in(self, x: Tensor, ranks: int) -> list[float]:
        """Return the values of a tensor of counts, none of which exceeds the number of ranks."""
        found: list[float] = x.tolist()
        return found

    @property
    def numbers(self) -> set[int]:
        """The numbers of the parameters that other ranks also have."""
        return {id(module._parameters[name]) for module, name, _ in self._ties}

    @property
    def copies(self) -> set[int]:
        """The numbers of this rank's parameters that the rank of an earlier stage has."""
        return {
            id(module._parameters[name])
            for module, name, ranks in self._ties
            if ranks[0] != self._own
        }
