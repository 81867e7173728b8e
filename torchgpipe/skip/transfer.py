"""Skips between layers: kept in a tracker of the thread, and transferred from cell to cell.

Each thread has a tracker. Without a pipeline it is one dictionary for all layers. In a pipeline
each cell has its own tracker with the skips that it pops. Skips that are left at the end of the
cell go on to later cells. The run keeps a dictionary of waiting skips for each micro-batch::

    cell that stashes    layers ─▶ tracker ── leave ──▶ output ── keep ──▶ waiting skips
                                                                             │ take
    cell that pops       layers ◀─ tracker ◀─ arrive ── input ◀─ transport ◀─┘

The transport moves a skip directly between the two partitions. The plain call uses an edge of the
graph, a step uses a leaf, and processes use a message.

[Note: Changes in place] The cell that stashes a skip may change it in place, and the layer that
pops it sees the change, as without a pipeline. A later change raises: whether it is seen would
depend on whether the skip was copied, and its gradient would be wrong. A change is detected by the
skip's version (rule 9). If other tensors lie in its memory,
:class:`~torchgpipe.engine.aliasing.Aliasing` watches them. There are two exceptions. Tensors of
inference mode have no versions, so changes are not detected. Micro-batches are views of one tensor
with one version, so it raises needlessly to change the input of the model in place and then stash
it.
"""

import uuid
from abc import ABCMeta
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.base.context import context
from torchgpipe.base.private import versions
from torchgpipe.base.structure import Kind, bare


@dataclass(frozen=True, order=True)
class Namespace(metaclass=ABCMeta):  # noqa: B024 - None registers as one
    """A scope for skip names; each new one is unlike all others.

    It is hashable and ordered, and a copy or a pickle of it equals it, so the pairs of a copied
    model still match.

    >>> import copy
    >>> namespace = Namespace()
    >>> copy.deepcopy(namespace) == namespace, Namespace() == namespace
    (True, False)
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4)


# The default namespace.
Namespace.register(type(None))

#: The unique key of a skip tensor in a model: its namespace and its name.
Key = tuple[Namespace | None, str]

#: The partition at the other end of a skip, and the skip's key.
End = tuple[int, Key]


class SkipTracker:
    """Skip tensors in a dictionary.

    >>> import torch
    >>> tracker = SkipTracker()
    >>> tracker.save(None, None, 'name', torch.ones(2))
    >>> tracker.load(None, None, 'name')
    tensor([1., 1.])

    The ``batch`` that each method takes is there for code written for torchgpipe 0.0.7, which led
    the graph of a skip through it.
    """

    def __init__(self) -> None:
        #: ``None`` for a skip is a value as well, which a layer has stashed.
        self.tensors: dict[Key, Tensor | None] = {}

    def save(
        self,
        batch: Any,
        ns: Namespace | None,
        name: str,
        tensor: Tensor | None,
    ) -> None:
        """Keep a skip tensor."""
        self.tensors[ns, name] = tensor

    def load(
        self,
        batch: Any,
        ns: Namespace | None,
        name: str,
    ) -> Tensor | None:
        """Return a skip tensor and let go of it; :exc:`KeyError` if there is none."""
        return self.tensors.pop((ns, name))

    def copy(
        self,
        batch: Any,
        prev_stream: Any,
        next_stream: Any,
        ns: Namespace | None,
        name: str,
    ) -> None:
        """Move a skip tensor to another device."""
        raise TypeError('copying is not supported without portals')


@contextmanager
def use_skip_tracker(skip_tracker: SkipTracker) -> Iterator[None]:
    """Let layers stash into and pop from a tracker within the context, in this thread.

    >>> tracker = SkipTracker()
    >>> with use_skip_tracker(tracker):
    ...     current_skip_tracker() is tracker
    True

    Args:
        skip_tracker: The tracker.
    """
    # A cell may run in a layer of another pipeline, in the same thread.
    outside = context.skips
    context.skips = skip_tracker
    try:
        yield
    finally:
        context.skips = outside


def current_skip_tracker() -> SkipTracker:
    """Return this thread's tracker: see :func:`use_skip_tracker`."""
    # Outside of a pipeline, all layers of the thread share one tracker.
    if context.skips is None:
        context.skips = SkipTracker()
    return context.skips  # type: ignore[no-any-return]


class Skip(NamedTuple):
    """A skip between its stash and its pop.

    Args:
        tensor: The tensor, or ``None`` if ``None`` was stashed.
        k: The index of the tensor in the partition's output.
    """

    tensor: Tensor | None
    #: The version of the tensor after the cell that stashed it.
    version: int = 0
    #: The partition that stashed it.
    j: int = 0
    k: int = 0
    #: Restores the attributes of the tensor.
    kind: Kind = bare


def leave(
    tracker: SkipTracker,
    outgoing: Iterable[End],
) -> dict[Key, Tensor]:
    """Return the skips that leave a cell, with all changes in place since they were stashed.

    Raises:
        RuntimeError: A layer has not stashed a skip that it declares.
    """
    skips = {}
    for _, key in outgoing:
        if key not in tracker.tensors:
            raise RuntimeError(f"'{key[1]}' must be stashed but have not")
        tensor = tracker.tensors[key]
        if tensor is not None:
            skips[key] = tensor
    return skips


def keep(
    waiting: dict[Key, Skip],
    outgoing: Iterable[End],
    j: int,
    stashed: Mapping[Key, Kind],
    output: Sequence[Tensor],
) -> None:
    """Keep the skips that left a cell of partition ``j``, the last tensors of its output."""
    # For a stashed `None`, the output does not have a tensor.
    for _, key in outgoing:
        waiting[key] = Skip(None)

    first = len(output) - len(stashed)
    for k, key in enumerate(stashed, first):
        tensor = output[k]
        (version,) = versions([tensor])
        waiting[key] = Skip(tensor, version, j, k, stashed[key])


def take(
    waiting: dict[Key, Skip],
    incoming: Iterable[End],
) -> tuple[list[Skip], dict[Key, Kind], list[Key]]:
    """Return the skips that a cell pops: those with a tensor, their kinds, and keys of ``None``.

    Raises:
        RuntimeError: A skip was changed in place: [Note: Changes in place].
    """
    skips = []
    popped = {}
    absent = []
    for _, key in incoming:
        # The cell owns the skip from now on (rule 5).
        skip = waiting.pop(key)
        if skip.tensor is None:
            absent.append(key)
            continue
        if versions([skip.tensor]) != [skip.version]:
            raise RuntimeError(changed_in_place(f"the skip tensor '{key[1]}'"))
        popped[key] = skip.kind
        skips.append(skip)
    return skips, popped, absent


def arrive(
    popped: dict[Key, Kind],
    absent: Iterable[Key],
    tensors: list[Tensor],
) -> SkipTracker:
    """Return a tracker with the skips that a cell pops, removed from the end of its input."""
    tracker = SkipTracker()
    tracker.tensors.update(dict.fromkeys(absent))
    # From the end of the input, the last skip comes first.
    for key, kind in reversed(popped.items()):
        tracker.tensors[key] = kind([tensors.pop()])
    return tracker


def changed_in_place(what: str) -> str:
    """Return the error message for a change in place that a skip would have to see."""
    return (
        f'{what} was changed in place between its stash and its pop, in another partition '
        'than the one that stashed it. Without a pipeline, the layer that pops would see that '
        'change; here it cannot. Use an operation that is not in place, or stash a copy: '
        "stash('name', tensor.clone())."
    )
