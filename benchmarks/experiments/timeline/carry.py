"""Skip tensors without portals: carried along through every layer between stash and pop.

::

    layers            stash a        b            c        pop a
    with portals         a ───────────────────────────────▶ a
    carried          x ──▶ (x, a) ──▶ (x, a) ──▶ (x, a) ──▶ x       copied at every boundary
"""

from torch import Tensor, nn

from torchgpipe.base.structure import Tensors, Value
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
