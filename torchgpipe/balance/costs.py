"""Profiles: what the layers of a model cost, and the balances that follow."""
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, TypeVar

from torchgpipe.balance.blockpartition import check_partitions
from torchgpipe.balance.bounded import solve_bounded
from torchgpipe.balance.layers import LayerProfile, SkipProfile, check_numbers
from torchgpipe.balance.step import Balance, StepCost, even_cuts, group, ungroup
from torchgpipe.balance.table import format_bytes, table

__all__ = ['Profile']

T = TypeVar('T')

MemoryLimit = None | int | Sequence[int | None]


@dataclass(frozen=True)
class Profile:
    """What the layers of a sequential module cost: made by :func:`torchgpipe.balance.profile`.

    Times are medians in seconds, sizes are in bytes, all for one training step on the whole
    sample, without checkpoints. ``print(profile)`` shows a table.

    >>> layer = LayerProfile('0', forward_seconds=0.002, backward_seconds=0.004,
    ...                      parameter_bytes=288, frozen_bytes=0, buffer_bytes=0,
    ...                      activation_bytes=0, output_bytes=512)
    >>> profile = Profile((layer,), (), batch_size=16, input_bytes=512, device='cpu')
    >>> print(profile)  # doctest: +NORMALIZE_WHITESPACE
    layer  forward, ms  backward, ms  parameters  activations  output
    ─────  ───────────  ────────────  ──────────  ───────────  ──────
    0            2.000         4.000       288 B          0 B   512 B
    total        2.000         4.000       288 B          0 B
    <BLANKLINE>
    16 samples on cpu
    """

    #: In the order of the model.
    layers: tuple[LayerProfile, ...]
    #: All skips between them.
    skips: tuple[SkipProfile, ...]
    #: The batch size of the sample.
    batch_size: int
    #: Of the sample.
    input_bytes: int
    #: Where it was measured.
    device: str

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.batch_size < 1:
            raise ValueError(f'the batch_size of a Profile must be 1 or more, but is '
                             f'{self.batch_size}')

    def __str__(self) -> str:
        rows = [[layer.name, f'{layer.forward_seconds * 1e3:.3f}',
                 f'{layer.backward_seconds * 1e3:.3f}', format_bytes(layer.parameter_bytes),
                 format_bytes(layer.activation_bytes), format_bytes(layer.output_bytes)]
                for layer in self.layers]
        rows.append(['total', f'{sum(x.forward_seconds for x in self.layers) * 1e3:.3f}',
                     f'{sum(x.backward_seconds for x in self.layers) * 1e3:.3f}',
                     format_bytes(sum(x.parameter_bytes for x in self.layers)),
                     format_bytes(sum(x.activation_bytes for x in self.layers)), ''])
        return table(['layer', 'forward, ms', 'backward, ms', 'parameters', 'activations',
                      'output'], rows) + f'\n\n{self.batch_size} samples on {self.device}'

    def to_dict(self) -> dict[str, Any]:
        """Give it as what JSON can hold: dictionaries, lists, strings and numbers.

        >>> profile = Profile((LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4),), (), 16, 4, 'cpu')
        >>> Profile.from_dict(profile.to_dict()) == profile
        True
        """
        return {'version': 1, **asdict(self), 'layers': [asdict(x) for x in self.layers],
                'skips': [asdict(x) for x in self.skips]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> 'Profile':
        """Take what :meth:`to_dict` gave.

        Args:
            data: That, also after a way through JSON.

        Returns:
            The profile.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(data, dict) or data.get('version') != 1 or data['version'] is True:
            raise ValueError("this is not a profile: it has no 'version': 1, as Profile.to_dict() "
                             'writes it')
        rest = {key: value for key, value in data.items() if key != 'version'}
        for key, cls in (('layers', LayerProfile), ('skips', SkipProfile)):
            items = rest.get(key)
            rest[key] = tuple(_make(cls, item) for item in items) \
                if isinstance(items, (list, tuple)) else items
        if not (isinstance(rest['layers'], tuple) and isinstance(rest['skips'], tuple)):
            raise ValueError("this is not a profile: its 'layers' and 'skips' are no lists")
        return _make(Profile, rest)

    def scaled(self, batch_size: int) -> 'Profile':
        """Give the profile of another batch, as if all but overheads grew with it.

        >>> layer = LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4, forward_overhead=0.5)
        >>> profile = Profile((layer,), (), batch_size=16, input_bytes=4, device='cpu')
        >>> profile.scaled(32).layers[0].forward_seconds
        1.5
        """
        ratio = batch_size / self.batch_size

        def seconds(all: float, overhead: float) -> float:
            overhead = min(overhead, all)  # Of a small batch, more may have been measured.
            return overhead + (all - overhead) * ratio

        layers = tuple(replace(
            x, forward_seconds=seconds(x.forward_seconds, x.forward_overhead),
            backward_seconds=seconds(x.backward_seconds, x.backward_overhead),
            activation_bytes=round(x.activation_bytes * ratio),
            output_bytes=round(x.output_bytes * ratio)) for x in self.layers)
        skips = tuple(replace(x, bytes=round(x.bytes * ratio)) for x in self.skips)
        return replace(self, layers=layers, skips=skips, batch_size=batch_size,
                       input_bytes=round(self.input_bytes * ratio))

    def balance(self, partitions: int, *, chunks: int, memory_limit: MemoryLimit = None,
                param_scale: float = 2.0, checkpoint: str = 'except_last') -> Balance:
        """Find the balance whose slowest partition is as fast as possible.

        That is exact for the measured times. Ties are broken as evenly as possible, where that
        keeps the limits of memory.

        >>> layers = [LayerProfile(str(k), k, 2 * k, 8, 0, 0, 4, 4) for k in range(1, 7)]
        >>> profile = Profile(tuple(layers), (), 16, 4, 'cpu')
        >>> balance = profile.balance(2, chunks=4, checkpoint='never')
        >>> balance, balance.seconds, round(balance.bubble, 2)
        ([4, 2], [30.0, 33.0], 0.22)

        Args:
            partitions: Number of partitions.
            chunks: Number of micro-batches.
            memory_limit: Bytes of each device: one number for all of them, or one per partition,
                where ``None`` is no limit.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter: SGD 2–3, Adam 4–5, Adadelta 4, Adagrad 3, RMSprop 3–5.
            checkpoint: As for :class:`~torchgpipe.GPipe`.

        Returns:
            The balance, with what it predicts.

        Raises:
            ValueError: An argument is wrong, or no balance keeps the limits.
        """
        partitions, chunks = _take(partitions, 'partitions'), _take(chunks, 'chunks')
        limits = _take_limits(memory_limit, partitions)
        step = StepCost(self.layers, self.skips, self.input_bytes, partitions,
                        min(chunks, self.batch_size), param_scale, checkpoint)
        check_partitions(step.costs, partitions)
        edges = self.edges()
        if len(edges) <= partitions:
            if checkpoint != 'never':
                raise ValueError(_inseparable(self, len(edges) - 1, partitions))
            edges = list(range(len(self.layers) + 1))
        balance = step.predict(even_cuts(step.costs, edges, partitions))
        if all(limit is None or size <= limit for limit, size in zip(limits, balance.bytes)):
            return balance
        cases = {(limit, j == partitions - 1) for j, limit in enumerate(limits)}
        found = {case: step.furthest(edges, *case) for case in cases}
        furthest = [found[limit, j == partitions - 1] for j, limit in enumerate(limits)]
        lengths = solve_bounded(group(step.costs, edges), furthest)
        if lengths is None:
            raise ValueError(step.why_not(edges, limits, furthest))
        return step.predict(ungroup(lengths, edges))

    def edges(self) -> list[int]:
        """Give the places where partitions may start and end.

        A layer that changes in place what another one gave belongs into its partition. A
        checkpointed partition must not change its own input, and elsewhere the change may come too
        late for a skip.
        """
        forbidden: set[int] = set()
        for index, layer in enumerate(self.layers):
            if layer.changes is not None:
                forbidden.update(range(layer.changes + 1, index + 1))
        return [edge for edge in range(len(self.layers) + 1) if edge not in forbidden]


def _inseparable(profile: Profile, groups: int, partitions: int) -> str:
    layer = next(x for x in profile.layers if x.changes is not None)
    return (f'{len(profile.layers)} layers make only {groups} groups for {partitions} partitions, '
            "since a layer that changes another one's result in place has to be in its partition: "
            f"'{layer.name}' is one; let it not work in place, or use checkpoint='never'")


def _make(cls: type[T], data: Any) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if not isinstance(data, dict) or set(data) != names:
        problem = f'{data!r} is one' if not isinstance(data, dict) else \
            f'missing {sorted(names - set(data))}, unknown {sorted(set(data) - names)}'
        raise ValueError(f'this is not a profile: fields of a {cls.__name__}: {problem}')
    try:
        return cls(**data)
    except ValueError as error:
        raise ValueError(f'this is not a profile: {error}') from None


def _take(number: int, what: str) -> int:
    if isinstance(number, bool) or not hasattr(number, '__index__'):
        raise TypeError(f'{what} must be an integer, but is {number!r}')
    if number < 1:
        raise ValueError(f'{what} must be a positive integer, but is {number}')
    return number.__index__()


def _take_limits(limit: MemoryLimit, partitions: int) -> list[int | None]:
    if isinstance(limit, (list, tuple)):
        limits: list[Any] = list(limit)
        if len(limits) != partitions:
            raise ValueError(f'memory_limit has {len(limits)} entries for {partitions} '
                             'partitions; give one number for all, or one for each')
    else:
        limits = [limit] * partitions
    each: list[Any] = limits
    for one in each:
        # NumPy's integers are real numbers, too.
        if one is not None and not (isinstance(one, Real) and float(one) >= 0):
            raise ValueError('memory_limit must be a number of bytes, zero or more, but is '
                             f'{one!r}')
    return limits
