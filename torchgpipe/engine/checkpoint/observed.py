"""Observed behaviour of a partition's layers: random numbers, and writes to their state.

Nobody can tell from a module whether it will. So the first cell of a partition in each mode is
watched by a dispatch mode. Later cells save the states of the random generators that these layers
use, and copy the tensors that they write to.
"""
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchgpipe.base.private import generator_key, unseen
from torchgpipe.base.structure import Memories, Slot, copy_of, is_plain, storage_id
from torchgpipe.engine.checkpoint.attributes import attributes_of, contents_of, may_be_mutated
from torchgpipe.engine.checkpoint.draws import Recorder, operation_of

__all__ = ['Observed', 'Watch']


class Observed:
    """What layers were seen to do in one mode, which the training flags of all modules tell."""

    def __init__(self) -> None:
        #: Whether they draw from a generator that other threads may use; ``None`` if not known
        #: yet.
        self.draws: bool | None = None
        #: Whether a checkpointed cell was watched. Others show only whether they draw.
        self.watched = False
        #: Generators of their own, by keys.
        self.generators: dict[int, torch.Generator] = {}
        #: Parameters and buffers that they write to.
        self.written: set[Slot] = set()
        #: Modules of which they set other attributes, or that have tensors in them.
        self.mutated: set[nn.Module] = set()
        #: Whether they ask which pass they are in, and so deal with their attributes themselves.
        self.asks_phase = False
        self._false_alarms = 0

    def learn(self, recorder: Recorder) -> None:
        """Take note of the observations of a recorder."""
        self.draws = bool(self.draws or recorder.draws)
        self.generators.update(recorder.generators)

    def watch_draws(self) -> None:
        """Take note that someone drew while these layers ran, which were seen not to.

        They are watched again; less and less often, for it may be another thread each time.
        """
        if self.draws is False:
            self._false_alarms += 1
            if self._false_alarms & (self._false_alarms - 1) == 0:  # a power of two
                self.draws = None

    def watch_again(self) -> None:
        """Let the next cell be watched as the first one was."""
        self.draws = None
        self.watched = False


class Watch(Recorder):
    """A recorder that also sees what a cell makes of its layers.

    It copies parameters and buffers before the first write to them.

    Args:
        modules: The layers, and all within.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.copies: Memories = {}
        self._found = {module: attributes_of(module) for module in modules}
        self._contents = {
            module: {name: contents for name, value in found.items()
                     if (contents := contents_of(name, value)) is not None}
            for module, found in self._found.items()}
        self._watched = {storage_id(x) for module in self._found
                         for x in (*module._parameters.values(), *module._buffers.values())
                         if x is not None and is_plain(x)}
        values = [value for found in self._found.values() for value in found.values()]
        values += [value for found in self._contents.values() for contents in found.values()
                   for value in contents]
        self.generators = {generator_key(value): value for value in values
                           if isinstance(value, torch.Generator)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in operation_of(func).written_by(args, kwargs or {}):
            if is_plain(x) and storage_id(x) in self._watched:
                with unseen():
                    copy_of(x, self.copies)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def mutated(self) -> set[nn.Module]:
        """Return the modules whose attributes are others now, or are tensors."""
        return {module for module, found in self._found.items()
                if may_be_mutated(found, self._contents[module], attributes_of(module))}
