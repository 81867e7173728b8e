"""The layout of skips: the source and destination partition of each.

::

    partition      0            1          2            3
    layers      stash a      stash b     pop b       pop a, stash c, pop c
                   a ───────────────────────────────▶ a             copied once, from 0 to 3
                                b ──────▶ b                         copied once, from 1 to 2
                                                       c            not copied
"""

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Protocol, runtime_checkable

from torch import nn

from torchgpipe.skip.transfer import End, Key, Namespace


@runtime_checkable
class DeclaresSkips(Protocol):
    """A layer that declares the skips that it stashes and pops."""

    def stashable(self) -> Iterable[Key]:
        """Return the skips that it stashes."""

    def poppable(self) -> Iterable[Key]:
        """Return the skips that it pops."""


class SkipLayout:
    """Where skips start and end.

    >>> layout = SkipLayout(3, {(None, 'a'): (0, 2), (None, 'b'): (1, 1)})
    >>> layout.requires_copy(None, 'a'), layout.requires_copy(None, 'b')
    (True, False)
    >>> list(layout.copy_policy(2))
    [(0, None, 'a')]

    Args:
        num_partitions: Number of partitions.
        skip_routes: For each skip ``(namespace, name)`` the partitions ``(source, destination)``.
    """

    def __init__(
        self,
        num_partitions: int,
        skip_routes: dict[Key, tuple[int, int]],
    ) -> None:
        self._routes = dict(skip_routes)
        self._incoming: list[list[End]] = []
        self._outgoing: list[list[End]] = []
        for _ in range(num_partitions):
            self._incoming.append([])
            self._outgoing.append([])

        for key, (prev_j, next_j) in skip_routes.items():
            # Within a partition, a skip stays in the tracker of its cell.
            if prev_j != next_j:
                self._incoming[next_j].append((prev_j, key))
                self._outgoing[prev_j].append((next_j, key))
        for incoming in self._incoming:
            # By the source only, because the default namespace cannot be compared with others.
            incoming.sort(key=itemgetter(0))

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Return whether a skip goes from one partition to another."""
        # A skip that no layer pops does not have a route.
        prev_j, next_j = self._routes.get((ns, name), (-1, -1))
        return prev_j != next_j

    def copy_policy(self, next_j: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """Yield ``(source, namespace, name)`` of skips into a partition, by ascending sources."""
        for prev_j, (ns, name) in self._incoming[next_j]:
            yield prev_j, ns, name

    def incoming(self, j: int) -> list[End]:
        """Return the skips that come into a partition, each with its source."""
        return self._incoming[j]

    def outgoing(self, j: int) -> list[End]:
        """Return the skips that leave a partition, each with its destination."""
        return self._outgoing[j]


def inspect_skip_layout(partitions: Iterable[nn.Module]) -> SkipLayout:
    """Find out where skips start and end.

    >>> layout = inspect_skip_layout([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())])
    >>> list(layout.copy_policy(1))
    []

    Args:
        partitions: Sequential modules; the layers that stash or pop are their children.

    Returns:
        The layout. Skips that no layer pops are not in it.

    Raises:
        TypeError: A layer within a child has a skip like one that goes to another partition.
    """
    # The partitions of the skips that no layer has popped yet.
    stashed_at = {}
    routes = {}
    parts = list(partitions)
    for j, partition in enumerate(parts):
        for layer in partition.children():
            if not isinstance(layer, DeclaresSkips):
                continue
            for key in layer.stashable():
                stashed_at[key] = j
            for key in layer.poppable():
                if key in stashed_at:
                    routes[key] = stashed_at.pop(key), j

    # A layer within a child cannot be checked before all routes are known.
    layout = SkipLayout(len(parts), routes)
    for partition in parts:
        for layer_name, layer in partition.named_children():
            _verify_inner(layer_name, layer, layout)
    return layout


def _verify_inner(
    layer_name: str,
    layer: nn.Module,
    layout: SkipLayout,
) -> None:
    for inner in layer.modules():
        if inner is layer or not isinstance(inner, DeclaresSkips):
            continue
        keys = [*inner.stashable(), *inner.poppable()]
        for ns, name in keys:
            # In the tracker, the inner skip might replace the other.
            if layout.requires_copy(ns, name):
                raise TypeError(
                    f"a layer within '{layer_name}' declared '{name}', which also goes from "
                    'one partition to another, between other layers; isolate one of both by a '
                    'namespace: layer.isolate(Namespace())'
                )
