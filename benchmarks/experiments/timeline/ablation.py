"""Switch off torchgpipe's features for speed and memory, to measure the effect of each.

==============  ============================================================================
off             instead
==============  ============================================================================
``dependency``  no edge keeps the order of micro-batches in backward
``streams``     copies wait in the stream of the computation
``portals``     skips are carried through every partition
==============  ============================================================================

The results of the model stay the same.

Without portals, skip tensors are carried along through every layer between stash and pop::

    layers            stash a        b            c        pop a
    with portals         a ───────────────────────────────▶ a
    carried          x ──▶ (x, a) ──▶ (x, a) ──▶ (x, a) ──▶ x       copied at every boundary
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import Tensor, nn

from torchgpipe.base.structure import Tensors, Value
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.streams import current_stream
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.skip.transfer import Key, SkipTracker, use_skip_tracker


def carry(model: nn.Sequential) -> nn.Sequential:
    """Wrap each layer into one that takes ``(x, *skips)`` and gives ``(x, *skips)``.

    Layers, parameters and results are the model's. No skip is left that GPipe would detect.
    """
    alive: list[Key] = []
    layers = []
    for layer in model:
        pops, stashes = _keys(layer)
        before = tuple(alive)
        alive = [key for key in alive if key not in pops] + sorted(stashes)
        layers.append(_Carrying(layer, before, tuple(alive)))
    return nn.Sequential(*layers)


def _keys(layer: nn.Module) -> tuple[set[Key], set[Key]]:
    if not isinstance(layer, DeclaresSkips):
        return set(), set()
    return set(layer.poppable()), set(layer.stashable())


class _Carrying(nn.Module):
    """A layer, and the skips that come to it and leave it."""

    def __init__(self, layer: nn.Module, before: tuple[Key, ...], after: tuple[Key, ...]) -> None:
        super().__init__()
        self.layer = layer
        self.has_skips = isinstance(layer, DeclaresSkips)
        self.before = before
        self.after = after

    def forward(self, input: Value) -> Value:
        skips: Tensors = ()
        if self.before:
            tensors = tuple(input)
            input, skips = _unpack(tensors[: -len(self.before)]), tensors[-len(self.before) :]
        carried = dict(zip(self.before, skips))
        output = self._call(input, carried) if self.has_skips else self.layer(input)
        if not self.after:
            return output
        tensors = (output,) if isinstance(output, Tensor) else output
        return (*tensors, *(carried[key] for key in self.after))

    def _call(self, input: Value, carried: dict[Key, Tensor | None]) -> Value:
        """Let the layer pop and stash the carried skips."""
        tracker = SkipTracker()
        tracker.tensors = carried
        with use_skip_tracker(tracker):
            return self.layer(input)


def _unpack(tensors: Tensors) -> Value:
    return tensors[0] if len(tensors) == 1 else tensors


@contextmanager
def without(off: Collection[str]) -> Iterator[None]:
    """Switch off, within the context, the features that do not require a change of the model."""
    with ExitStack() as stack:
        if 'dependency' in off:
            never = property(lambda self: False, lambda self, value: None)
            stack.enter_context(patch.object(PlainCall, '_orders', never, create=True))
        if 'streams' in off:
            stack.enter_context(patch('torchgpipe.engine.workers.new_stream', current_stream))
        yield
