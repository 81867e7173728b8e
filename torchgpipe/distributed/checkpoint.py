"""Checkpoints: saved on any mesh, loaded on any other one, or in one process.

::

    model.0.weight                                parameters and buffers
    optimizer.state.0.weight.exp_avg              the optimizer's state of a parameter
    optimizer.param_groups.0.weight.lr            and its options for the parameter
    random.1x2x1.0.cpu                            generators, by mesh and rank
    extra.all.step                                further state of a training: of all ranks,
    extra.2.1.loader                              or of the second one of two replicas

Each rank writes and reads its own entries, under the names of the whole model. One rank writes the
entries that several ranks have. ``torch.distributed.checkpoint`` writes and reads the files.
"""

import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim import Optimizer

from torchgpipe.base.devices import CPU, rng_states, set_rng_states
from torchgpipe.base.settings import AXES
from torchgpipe.distributed.agreement import AnyFacts, Facts, check_settings, digest
from torchgpipe.distributed.comparison import BitwiseComparison
from torchgpipe.distributed.mesh import Axis, MeshInfo
from torchgpipe.distributed.rank import Rank
from torchgpipe.shard.collectives import F, gathered
from torchgpipe.shard.entries import NamedOptimizer, by_names, check_names, is_tensor, some, under
from torchgpipe.shard.folders import Folder, Saving, Writer, as_errors, opened

#: Shapes by name; ``None`` for values that are not tensors.
Shapes = dict[str, tuple[int, ...] | None]

#: Options of a group as a whole: each rank has other parameters in it.
_OF_GROUPS = ('params', 'param_names')

#: Options that schedulers of learning rates add to an optimizer.
_SCHEDULERS = {'initial_lr', 'max_lr', 'min_lr', 'base_momentum', 'max_momentum', 'swa_lr'}

#: How many differences are named at most.
_MOST = 5

#: The key of a module's extra state, which may be of any kind and have any number of entries.
_EXTRA = '_extra_state'


def shapes(model: nn.Module) -> Shapes:
    """Return the shapes in the state dict of a model, or of a rank's part of it."""
    result: Shapes = {}
    for name, value in model.state_dict().items():
        if not name.endswith(_EXTRA):
            result[name] = tuple(value.shape) if isinstance(value, Tensor) else None
    return result


def saved_shapes(saved: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a model's tensors in a checkpoint."""
    result: Shapes = {}
    for name, value in under(saved, 'model.').items():
        if _EXTRA not in name:
            result[name] = tuple(value.size) if is_tensor(value) else None
    return result


# Checks that a checkpoint is of this model and optimizer.


def check_model(model: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the parameters and buffers of a model, in these shapes.

    Raises:
        ValueError: It does not. All ranks raise this error.
    """
    check_names('the checkpoint is of another model', 'model', model, saved, _MOST)
    differences = []
    for name, shape in model.items():
        if saved[name] != shape:
            differences.append(f'{name!r} is {saved[name]}, and not {shape}')
    if differences:
        raise ValueError(
            'the checkpoint is of a model of other sizes: in it '
            f'{some(differences[:_MOST], len(differences))}; make the model as it was made '
            'before'
        )


def check_optimizer(
    names: Collection[str], options: set[str], saved: Mapping[str, Collection[str]]
) -> None:
    """Check that a checkpoint is of an optimizer of these parameters.

    Raises:
        ValueError: It is not. All ranks raise this error.
    """
    if not saved:
        raise ValueError(
            'the checkpoint was saved without an optimizer: load it without one, or '
            'save it with one'
        )
    check_names(
        'the checkpoint is of an optimizer of other parameters', 'optimizer', names, saved, _MOST
    )
    saved_options = set().union(*saved.values())
    missing = options - saved_options - _SCHEDULERS
    foreign = saved_options - options - _SCHEDULERS
    # Releases of PyTorch differ in one of them only.
    if missing and foreign:
        raise ValueError(
            'the checkpoint is of an optimizer of another type: it has '
            f'{sorted(foreign)}, but this one {sorted(missing)}'
        )


# The optimizer.


def named(model: nn.Module, optimizer: Optimizer, ties: Mapping[str, str]) -> NamedOptimizer:
    """Return an optimizer by names; a tied parameter has the name in the first stage."""
    return NamedOptimizer(
        optimizer, {id(x): ties.get(name, name) for name, x in model.named_parameters()}
    )


def optimizer_entries(optimizer: NamedOptimizer) -> dict[str, Any]:
    """Return the states and options of an optimizer, by names.

    Raises:
        ValueError: Its state has tensors in a nested container.
    """
    entries: dict[str, Any] = {}
    for name, states in optimizer.states().items():
        for key, value in states.items():
            if isinstance(value, (dict, list)):
                raise ValueError(
                    f'the optimizer keeps a {type(value).__name__} as {key!r} of '
                    f'{name!r}, but a checkpoint takes tensors and numbers: save '
                    'optimizer.state_dict() of each rank on its own'
                )
            entries[f'state.{name}.{key}'] = value
    for group in optimizer.groups():
        for name in group['params']:
            for key, value in _options(group).items():
                entries[f'param_groups.{name}.{key}'] = value
    return entries


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_GROUPS}


def options_of(optimizer: NamedOptimizer) -> list[str]:
    """Return the names of the options that an optimizer has for each parameter."""
    return sorted(set().union(*map(_options, optimizer.groups())))


def saved_options(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of an optimizer in a checkpoint, for each parameter."""
    by_name = by_names(under(saved, 'optimizer.param_groups.'))
    return {name: _options(options) for name, options in by_name.items()}


def groups_of(
    optimizer: NamedOptimizer, options: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the options of each group of an optimizer, from the options of its parameters.

    Raises:
        ValueError: Parameters of one group had different options.
    """
    groups = []
    for group in optimizer.groups():
        names = group['params']
        for name in names[1:]:
            _check_same(names[0], name, options)
        groups.append(options[names[0]] if names else {})
    return groups


def _check_same(first: str, second: str, options: Mapping[str, dict[str, Any]]) -> None:
    """Check that two parameters of one group have the same options."""
    for key, value in options[second].items():
        expected = options[first].get(key)
        if repr(expected) != repr(value):
            raise ValueError(
                f'the optimizer has {first!r} and {second!r} in one group, but in the '
                f'checkpoint the {key} of the first is {expected!r}, and of the second '
                f'{value!r}; make the optimizer with the same groups of parameters'
            )


# Further state of a training.


#: The way out if schedulers of ranks have other groups.
_ALL_GROUPS = (
    'make the optimizers of all ranks with the same groups, in one order, also those '
    "without parameters there, {'params': []}"
)


def check_scheduler(
    key: str, scheduler: Any, state: Any, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Check that the saved state of a scheduler is for the groups that an optimizer has here.

    Raises:
        ValueError: The state has other groups.
    """
    optimizer = getattr(scheduler, 'optimizer', None)
    if not isinstance(optimizer, Optimizer) or not isinstance(state, Mapping):
        return
    number = len(optimizer.param_groups)
    for name in ('base_lrs', '_last_lr'):
        rates = state.get(name)
        if isinstance(rates, list) and len(rates) != number:
            raise ValueError(
                f'extra {key!r} has learning rates for {len(rates)} groups of '
                f'parameters, but its optimizer has {number} on this rank: '
                f'{_ALL_GROUPS}'
            )
    for number, (rate, group) in enumerate(zip(state.get('base_lrs', ()), groups)):
        initial = group.get('initial_lr', rate)
        if not _is_equal(rate, initial):
            raise ValueError(
                f'extra {key!r} has the initial learning rate {rate} for group '
                f'{number}, but the parameters of that group had {initial}: '
                f'{_ALL_GROUPS}'
            )


def extra_bytes(extra: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the states of some objects, or plain values, each as the bytes of a file.

    Raises:
        ValueError: A name has a dot, or is not a string.
    """
    files = {}
    for key, value in extra.items():
        if not isinstance(key, str) or not key or '.' in key:
            raise ValueError(f'extra has {key!r}, but names in it are strings without a dot')
        buffer = BytesIO()
        torch.save(value.state_dict() if hasattr(value, 'state_dict') else value, buffer)
        files[key] = buffer.getvalue()
    return files


def extra_entries(
    by_rank: Sequence[tuple[int, Mapping[str, bytes]]], replica: int
) -> dict[str, Tensor]:
    """Return the entries of the further state of a training.

    Args:
        by_rank: The replica of each rank, and its files.

    Raises:
        ValueError: Ranks have different names, or ranks of one replica have different values.
    """
    names = [sorted(files) for _, files in by_rank]
    if any(sorted_names != names[0] for sorted_names in names):
        raise ValueError(f'all ranks save extra with the same names in it, but they have {names}')
    first = dict(reversed(by_rank))
    entries = {}
    for key in first[replica]:
        for number, files in by_rank:
            if not _are_same(files[key], first[number][key]):
                raise ValueError(
                    f'ranks of replica {number} have other values of extra {key!r}, '
                    'but one of them is saved: give all the same. A scheduler has '
                    f'values for each group of parameters: {_ALL_GROUPS}'
                )
        data = first[replica][key]
        place = f'{len(first)}.{replica}'
        if all(_are_same(files[key], first[0][key]) for files in first.values()):
            data = first[0][key]
            place = 'all'
        entries[f'{place}.{key}'] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return entries


def _are_same(one: bytes, other: bytes) -> bool:
    """Return whether two files have equal values."""
    return one == other or _is_equal(_read(one), _read(other))


def _read(value: bytes) -> Any:
    return torch.load(BytesIO(value), weights_only=False)


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; values without a comparison are not."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.layout is b.layout is torch.strided and torch.equal(a, b)
    if isinstance(a, (set, frozenset)):  # Each process has its own order.
        return bool(a == b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return pickle.dumps(a) == pickle.dumps(b)


def extra_forms(
    saved: Mapping[str, Any], data: int, replica: int, asked: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors to read the extra entries of a checkpoint into.

    Raises:
        ValueError: The checkpoint does not have one of them, or has it for another number of
            replicas.
    """
    entries = under(saved, 'extra.')
    places = {}
    for path in entries:
        place, _, key = path.rpartition('.')
        places[key] = place
    for key in asked:
        if key not in places:
            raise ValueError(f'the checkpoint has no extra {key!r}; it has {sorted(places)}')
        if places[key] != 'all' and not places[key].startswith(f'{data}.'):
            raise ValueError(
                f'extra {key!r} is another one for each of {places[key].partition(".")[0]} '
                f'replicas in the checkpoint, and now there are {data}: leave it out, and make '
                'that object for the new number of replicas'
            )
    forms = {}
    for path, value in entries.items():
        if path.rpartition('.')[0] in ('all', f'{data}.{replica}'):
            forms[path] = torch.empty(value.size, dtype=torch.uint8)
    return forms


def load_extra(entries: Mapping[str, Tensor], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Load the states of objects; return all states and values by their names."""
    states = {}
    for path, x in entries.items():
        states[path.rpartition('.')[2]] = _read(x.numpy().tobytes())
    for key, value in asked.items():
        if hasattr(value, 'load_state_dict'):
            value.load_state_dict(states[key])
    return states


# Generators.


def random_entries(place: str, devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the states of the generators of the host and of some devices."""
    return {f'{place}.{name}': state for name, state in rng_states(devices).items()}


def restore_random(
    place: str, devices: Iterable[torch.device], entries: Mapping[str, Tensor]
) -> None:
    """Restore the states of generators, if there are any."""
    set_rng_states(devices, {key[len(place) + 1 :]: state for key, state in entries.items()})


#: Objects with states, and plain values, by names.
Extra = Mapping[str, Any] | None


def save(
    model: nn.Module,
    rank: 'Rank | Alone',
    folder: Folder,
    optimizer: Optimizer | None,
    extra: Extra,
    wait: bool = True,
    patience: Callable[[], float] = float,
) -> Saving | None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save`.

    Args:
        patience: Returns how long a rank waits for others, in seconds.
    """
    task = 'saving a checkpoint'
    mesh = rank.mesh
    writer = Writer(folder, mesh.number, mesh.size, patience)
    state = dict[str, Any]()
    extra_files = dict[str, bytes]()

    def read() -> Facts:
        _settle(rank)
        extra_files.update(extra_bytes(extra or {}))
        return Facts(
            settings=digest(writer.folder.name, wait),
            state=rank.state_of_layers(),
            names=comparison.names,
        )

    def prepare() -> Facts:
        entries = {
            'model': model.state_dict(),
            'optimizer': {},
            'random': random_entries(_name(mesh), rank.devices),
            'extra': extra_entries(by_rank, mesh.data.rank),
        }
        if optimizer is not None:
            by_name = named(model, optimizer, rank.ties.first_names)
            entries['optimizer'] = optimizer_entries(by_name)
        state.update(entries if wait else writer.stage(entries))
        if not mesh.number:
            writer.make_way()
        return Facts()

    _wait(rank, task)
    comparison = rank.comparison()
    facts = rank.agree(task, read, Facts())
    check_settings(task, facts)
    rank.check_states(facts)
    comparison.agree_names(facts)
    comparison.check()
    by_rank = _by_rank(mesh, (mesh.data.rank, extra_files))
    rank.agree(task, prepare, Facts())
    writer.plan(state, mesh.everyone)
    if not wait:
        rank.saving = saving = Saving(writer)
        return saving
    for turn in writer.turns():
        rank.agree(task, partial(_call, turn), Facts())
    return None


def _call(function: Callable[[], object]) -> Facts:
    """Call a function that has no facts."""
    function()
    return Facts()


def load(
    model: nn.Module,
    rank: 'Rank | Alone',
    folder: Folder,
    optimizer: Optimizer | None,
    extra: Extra,
) -> dict[str, Any]:
    """Load a model on all ranks: see :meth:`DistributedGPipe.load`.

    Options and further state are read before any tensor.
    """
    task = 'loading a checkpoint'
    mesh = rank.mesh
    loading = _Loading(model, rank, optimizer)

    def open_folder() -> Facts:
        _settle(rank)
        loading.open(folder)
        return Facts(settings=digest(sorted(loading.saved)))

    def read_tensors() -> Facts:
        loading.read_tensors(extra or {})
        return Facts(names=comparison.names)

    _wait(rank, task)
    comparison = rank.comparison()
    facts = rank.agree(task, open_folder, Facts())
    check_settings(task, facts)
    _check(_by_rank(mesh, loading.form), loading.saved)
    rank.agree(task, partial(_call, partial(loading.read_options, extra or {})), Facts())
    facts = rank.agree(task, read_tensors, Facts())
    comparison.agree_names(facts)
    comparison.check()
    return loading.states


def save_checkpoint(
    folder: Folder, module: nn.Module, optimizer: Optimizer | None = None, extra: Extra = None
) -> None:
    """Save a model of one process: a ``GPipe``, or the module that it wraps.

    >>> save_checkpoint('checkpoint', gpipe, optimizer)  # doctest: +SKIP

    Args:
        folder: As of :meth:`DistributedGPipe.save`.
        module: The model.
        optimizer: Its optimizer.
        extra: As of :meth:`DistributedGPipe.save`.

    Raises:
        FileExistsError: The folder has other things in it.
        ValueError: The optimizer has other parameters.
        RuntimeError: It cannot be written.
    """
    save(module, Alone(module), folder, optimizer, extra)


def load_checkpoint(
    folder: Folder, module: nn.Module, optimizer: Optimizer | None = None, extra: Extra = None
) -> dict[str, Any]:
    """Load a model into one process; it may have been saved on any mesh.

    >>> load_checkpoint('checkpoint', gpipe, optimizer)  # doctest: +SKIP

    Args:
        folder: As of :meth:`DistributedGPipe.load`.
        module: A ``GPipe``, or the module that it wraps.
        optimizer: Its optimizer.
        extra: As of :meth:`DistributedGPipe.load`.

    Returns:
        As :meth:`DistributedGPipe.load`.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is of another model, or of another optimizer.
        RuntimeError: It cannot be read.
    """
    return load(module, Alone(module), folder, optimizer, extra)


class _Loading:
    """A checkpoint while it is loaded. Each rank reads its own entries without waiting.

    Attributes:
        saved: The metadata of all entries, by path.
        form: The shapes of the model, the parameters of the optimizer and its options.
        states: In the end, all states and values of ``extra``, by names.
    """

    saved: Mapping[str, Any]
    states: dict[str, Any]
    _reader: FileSystemReader

    def __init__(
        self, model: nn.Module, rank: 'Rank | Alone', optimizer: Optimizer | None
    ) -> None:
        self._model = model
        self._rank = rank
        self._optimizer: NamedOptimizer | None = None
        names: list[str] = []
        options = None
        if optimizer is not None:
            self._optimizer = named(model, optimizer, rank.ties.first_names)
            names = self._optimizer.names
            options = options_of(self._optimizer)
        self.form = (shapes(model), names, options)
        self._groups: list[dict[str, Any]] = []
        self._extra: dict[str, Any] = {}

    def open(self, folder: Folder) -> None:
        """Open the last complete checkpoint in a folder."""
        mesh = self._rank.mesh
        self._reader, metadata = opened(folder, mesh.number, mesh.size)
        self.saved = metadata.state_dict_metadata

    def read_options(self, asked: Mapping[str, Any]) -> None:
        """Read the options of the optimizer, and further state.

        Raises:
            ValueError: Parameters of one group had different options, or a state is missing.
        """
        data = self._rank.mesh.data
        self._extra = extra_forms(self.saved, data.size, data.rank, asked)
        options: dict[str, Any] = {}
        if self._optimizer is not None:
            options = self._optimizer.empty_states(saved_options(self.saved))
        self._read({'optimizer': {'param_groups': options}, 'extra': self._extra})
        if self._optimizer is not None:
            self._groups = groups_of(self._optimizer, options)
        for path, value in self._extra.items():
            key = path.rpartition('.')[2]
            if key in asked:
                state = _read(value.numpy().tobytes())
                check_scheduler(key, asked[key], state, self._groups)

    def read_tensors(self, asked: Mapping[str, Any]) -> None:
        """Load the values of the model, its optimizer, generators and objects."""
        place = _name(self._rank.mesh)
        states: dict[str, Any] = {}
        if self._optimizer is not None:
            states = self._optimizer.empty_states(by_names(under(self.saved, 'optimizer.state.')))
        generators = {}
        for key, value in under(self.saved, f'random.{place}.').items():
            generators[f'{place}.{key}'] = torch.empty(value.size, dtype=torch.uint8)
        values = self._model.state_dict()
        self._read({'model': values, 'optimizer': {'state': states}, 'random': generators})
        # Tensors were read in place. Hooks and extra states still have to be loaded.
        self._model.load_state_dict(values)
        if self._optimizer is not None:
            self._optimizer.load(states, self._groups)
        restore_random(place, self._rank.devices, generators)
        self.states = load_extra(self._extra, asked)

    def _read(self, state: dict[str, Any]) -> None:
        with as_errors('loading a checkpoint'):
            state_dict_loader.load(state, storage_reader=self._reader, no_dist=True)


def _check(
    forms: Iterable[tuple[Shapes, list[str], list[str] | None]], saved: Mapping[str, Any]
) -> None:
    """Check that a checkpoint is of this model and optimizer, which are split over ranks."""
    model: Shapes = {}
    names: set[str] = set()
    options: set[str] = set()
    has_optimizer = False
    for shapes_of_rank, names_of_rank, options_of_rank in forms:
        model.update(shapes_of_rank)
        names.update(names_of_rank)
        if options_of_rank is not None:
            has_optimizer = True
            options.update(options_of_rank)
    check_model(model, saved_shapes(saved))
    if has_optimizer:
        check_optimizer(names, options, saved_options(saved))


# Ranks.


class Alone:
    """In place of a rank of a mesh, a process with the whole model."""

    def __init__(self, module: nn.Module) -> None:
        data, pipe, tensor = [Axis(name, 1, 0, None, None) for name in AXES]
        self.mesh = MeshInfo(None, data, pipe, tensor, None, None, CPU, {}, [], set())
        self.saving: Any = None
        self.devices = {x.device for x in (*module.parameters(), *module.buffers())}
        self.ties = SimpleNamespace(first_names={})

    def state_of_layers(self) -> int:
        """Return the digest of a state that no other rank has."""
        return 0

    def check_states(self, facts: Mapping[int, AnyFacts]) -> None:
        """Check nothing."""

    def comparison(self) -> BitwiseComparison:
        """Return a comparison without other ranks."""
        return BitwiseComparison(self.mesh, [], {}, {})

    def agree(self, task: str, function: Callable[[], F], default: F) -> dict[int, F]:
        """Call a function, and return its facts."""
        return {0: function()}


def _by_rank(mesh: MeshInfo, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if mesh.everyone is None:
        return [value]
    return gathered(value, mesh.everyone)


def _wait(rank: 'Rank | Alone', task: str) -> None:
    """Wait for the previous save on all ranks; raise no error of it.

    Ranks wait for each other in collectives, because these report a rank that has ended.
    """
    for all_ranks in (False, not rank.mesh.number):
        wait: Callable[[], object] = bool
        if rank.saving is not None:
            wait = partial(rank.saving.wait, all_ranks)
        rank.agree(task, partial(_call, wait), Facts())


def _settle(rank: 'Rank | Alone') -> None:
    """Raise the error of the previous save, if there is one."""
    if rank.saving is not None:
        rank.saving.settle()
        rank.saving = None


def _name(mesh: MeshInfo) -> str:
    """Return the sizes of a mesh, and the index of this rank in it."""
    data, pipe, tensor = mesh.axes
    index = (data.rank * pipe.size + pipe.rank) * tensor.size + tensor.rank
    return f'{data.size}x{pipe.size}x{tensor.size}.{index}'
