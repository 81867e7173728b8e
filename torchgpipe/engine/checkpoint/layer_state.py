"""What layers are made of: put back for a recomputation, and left alone by it.

A recomputation is exact only if it finds what the first pass found, and what it changes must not
stay changed. So while it runs, each module has another dictionary of attributes::

                               first pass of the cell     later     recomputation       afterwards
    module.__dict__            its own                              another             its own
    training                                                        as in first pass
    a buffer that changes      start ─────▶ end           …         a copy of start     as it was
    what does not change       the same at all times

Buffers and frozen parameters are kept as they were at the start: [Note: What changes is copied,
what does not costs nothing]. Other attributes are kept where the layers were seen to set them.

[Note: What is told by its version]
An optimizer writes to trainable parameters while the graph is still alive; to copy these on write
would copy the whole model. So they are copied only where a layer was seen to write to them, as an
embedding with a largest norm does. All others must still have the version that they had when the
cell's first pass ended; otherwise backward raises, as autograd does without checkpoints. On other
devices than the CPU, the same goes for large buffers and for frozen parameters.
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.aliases import Slot
from torchgpipe.context import context
from torchgpipe.engine.checkpoint.attributes import (OWN, SIMPLE, attributes_of, contents_of,
                                                     copy_of_container)
from torchgpipe.engine.checkpoint.layers import Layers
from torchgpipe.engine.checkpoint.observed import Watch
from torchgpipe.engine.checkpoint.snapshot import Memories, Snapshot, copy_of, is_plain, view_of
from torchgpipe.engine.memory import size_of, storage_id, versions
from torchgpipe.errors import uninterrupted
from torchgpipe.private import unseen

__all__ = ['CellState']

T = TypeVar('T')

#: Gives what a recomputation uses, from what is there now and the memories copied for it.
Restore = Callable[[Any, Memories], Any]

Restores = dict[nn.Module, dict[str, Restore]]

#: A module, its attributes, and those for a recomputation.
Swap = tuple[nn.Module, dict[str, Any], dict[str, Any]]

#: A module, the name of an attribute, its value, and that for a recomputation.
ScriptSwap = tuple[nn.Module, str, Any, Any]

#: Buffers of at most so many bytes are copied for every cell where copies can't be made on write.
SMALL = 1 << 16

_NONE: dict[str, Restore] = {}

#: Sets an attribute of a module, without what `nn.Module` makes of that.
assign = object.__setattr__


def _now(now: Any, memories: Memories) -> Any:
    """Restore what is there now."""
    return now


def _nothing(now: Any, memories: Memories) -> None:
    """Restore an empty place."""


def _copy_of_now(now: Any, memories: Memories) -> Any:
    """Restore a buffer that a lazy layer had not made yet, so that the copy is written to."""
    return None if now is None else copy_of(now, memories)


class CellState:
    """The layers of a partition as one cell finds them.

    Args:
        layers: The layers.
        watch: What watches this cell, if it is the first one in its mode.
    """

    __slots__ = ('_attributes', '_buffers', '_layers', '_lost', '_memories', '_parameters',
                 '_version_checked', '_versions', '_watch')

    def __init__(self, layers: Layers, watch: Watch | None = None) -> None:
        self._layers = layers
        self._watch = watch
        self._lost: Slot | None = None
        self._memories: Memories = {}
        #: How to restore parameters, buffers and other attributes, by module and name.
        self._parameters: Restores = {}
        self._buffers: Restores = {}
        self._attributes: Restores = {}
        kept, told = layers.parameters()
        #: What is told by its version.
        self._version_checked = told
        with unseen():
            for slot, tensor in kept:
                _put(self._parameters, slot, self._keep(slot, tensor))
            for module in layers.modules:
                if module._buffers:
                    self._buffers[module] = {name: self._keep_buffer((module, name), buffer)
                                             for name, buffer in module._buffers.items()}
                if watch is not None or module in layers.observed.mutated:
                    self._attributes[module] = self._keep_attributes(module)
        self._versions = versions([tensor for _, tensor in self._version_checked])
        context.asked = False

    def _keep(self, slot: Slot, tensor: Tensor, at_once: bool = False) -> Restore:
        at_once = at_once or size_of(tensor) <= SMALL or slot in self._layers.observed.written
        kept = self._layers.keep(slot, tensor, self._memories, at_once)
        if kept is not None:
            return kept.restored
        self._version_checked = [*self._version_checked, (slot, tensor)]
        return _now

    def _keep_buffer(self, slot: Slot, buffer: Tensor | None) -> Restore:
        if buffer is None:
            return _nothing
        if is_lazy(buffer):
            return _copy_of_now
        # Nothing is known yet of those in the first cell; and one that carries a graph must not be
        # kept alive.
        return self._keep(slot, buffer, self._watch is not None or buffer.requires_grad)

    def _keep_attributes(self, module: nn.Module) -> dict[str, Restore]:
        return {name: self._keep_attribute((module, name), value)
                for name, value in attributes_of(module).items()}

    def _keep_attribute(self, slot: Slot, value: Any) -> Restore:
        if isinstance(value, Tensor):
            return self._keep(slot, value, at_once=True)
        if contents_of(slot[1], value) is not None:
            kept = copy_of_container(value)
            return lambda now, memories: copy_of_container(kept)
        return (lambda now, memories: value) if isinstance(value, SIMPLE) else _now

    def end(self) -> None:
        """Look what the first pass has changed."""
        self._layers.hooks  # as of now, since a hook may remove itself
        watch, self._memories = self._watch, {}
        after = versions([tensor for _, tensor in self._version_checked])
        if watch is None and after == self._versions:
            return
        self._end_version_checked(after, {} if watch is None else watch.copies)
        if watch is not None:
            observed = self._layers.observed
            observed.watched = True
            observed.asks_phase |= context.asked
            observed.mutated |= set() if observed.asks_phase else watch.mutated()
            self._attributes = {module: restores for module, restores in self._attributes.items()
                                if module in observed.mutated}
            observed.written.update(self._written())
            self._watch = None

    def _written(self) -> Iterator[Slot]:
        """Yield the buffers that the first cell wrote to, or made."""
        for slot, kept in self._layers.kept.items():
            if kept.was_written(getattr(*slot, None)):
                yield slot
        for module in self._layers.modules:
            for name, _ in module._buffers.items():
                if self._buffers.get(module, _NONE).get(name, _copy_of_now) is _copy_of_now:
                    yield module, name

    def _end_version_checked(self, after: list[int], copies: Memories) -> None:
        """Restore from a copy what was written to after all, if one was made before."""
        told = []
        for (slot, tensor), version, now in zip(self._version_checked, self._versions, after):
            copy = copies.get(storage_id(tensor)) if is_plain(tensor) else None
            if copy is None and version == now:
                told.append((slot, tensor))
                continue
            self._layers.observed.written.add(slot)
            if copy is None:
                self._lost = slot
            else:
                where = self._buffers if slot[1] in slot[0]._buffers else self._parameters
                _put(where, slot, Snapshot(tensor, view_of(copy, tensor)).restored)
        self._version_checked, self._versions = told, versions([tensor for _, tensor in told])

    def watch_again(self) -> None:
        """Take note that a recomputation failed, so that more was to be seen than was seen."""
        self._layers.observed.watch_again()

    def run(self, function: Callable[[], T]) -> T:
        """Run a recomputation on what the first pass found."""
        with self._layers.lock:
            self._check()
            memories: Memories = {}
            with unseen():
                swaps: list[Swap] = [
                    (module, module.__dict__, self._attributes_for(module, training, memories))
                    for module, training in self._layers.plain]
                scripts = [swap for module, training in self._layers.scripts
                           for swap in self._script_swaps(module, training, memories)]
            try:
                for module, _, attributes in swaps:
                    assign(module, '__dict__', attributes)
                for module, name, _, value in scripts:
                    setattr(module, name, value)
                return function()
            finally:
                if self._layers.observed.asks_phase:
                    _keep_attributes(swaps)
                uninterrupted(partial(_put_back, swaps, scripts))

    def _check(self) -> None:
        """Raise if what is told by its version has another one now."""
        if self._lost is not None:
            raise RuntimeError(
                f'{self._layers.name(self._lost)} was written to by its layer in a checkpointed '
                'micro-batch, as was never seen before in this mode, so its value from before is '
                'not there for the recomputation. Call the model again: from now on it is kept.')
        now = versions([tensor for _, tensor in self._version_checked])
        if now == self._versions:
            return
        slot, expected, version = next(
            (slot, before, after) for (slot, _), before, after
            in zip(self._version_checked, self._versions, now) if before != after)
        raise RuntimeError(
            f'{self._layers.name(slot)} has been modified by an inplace operation between forward '
            f'and backward (it is at version {version}; expected version {expected}), so a '
            'checkpointed micro-batch can not be recomputed. Call backward before the '
            "optimizer's step, or use checkpoint='never'.")

    def _attributes_for(self, module: nn.Module, training: bool, memories: Memories
                        ) -> dict[str, Any]:
        """Return the attributes of a module for a recomputation."""
        now, layers = module.__dict__, self._layers
        mutated = self._attributes.get(module)
        attributes = {**now} if mutated is None else _restored(mutated, now, memories)
        attributes['training'] = training
        attributes.update(layers.hooks[module])
        attributes['_parameters'] = parameters = {
            **now['_parameters'], **layers.parameters_of(module)}
        if module in self._parameters:
            parameters.update(_restored(self._parameters[module], parameters, memories))
        buffers = self._buffers.get(module)
        attributes['_buffers'] = {} if buffers is None else _restored(
            buffers, now['_buffers'], memories)
        return attributes

    def _script_swaps(self, module: nn.Module, training: bool, memories: Memories
                      ) -> Iterator[ScriptSwap]:
        """Yield the same for a module of TorchScript, attribute by attribute."""
        yield module, 'training', module.training, training
        own = self._layers.parameters_of(module)
        for now, restores in ((module._parameters, self._parameters.get(module, _NONE)),
                              (module._buffers, self._buffers.get(module, _NONE))):
            for name, tensor in now.items():
                if name in restores:
                    yield module, name, tensor, restores[name](tensor, memories)
                elif own.get(name, tensor) is not tensor:
                    yield module, name, tensor, own[name]
        for name, restore in self._attributes.get(module, _NONE).items():
            value = getattr(module, name)
            yield module, name, value, restore(value, memories)


def _restored(restores: dict[str, Restore], now: dict[str, Any], memories: Memories
              ) -> dict[str, Any]:
    return {name: restore(now.get(name), memories) for name, restore in restores.items()}


def _put(restores: Restores, slot: Slot, restore: Restore) -> None:
    restores.setdefault(slot[0], {})[slot[1]] = restore


def _keep_attributes(swaps: list[Swap]) -> None:
    """Let modules keep what layers have set that know in which pass they did."""
    for _, own, attributes in swaps:
        own.update((name, value) for name, value in attributes.items() if name not in OWN)


def _put_back(swaps: list[Swap], scripts: list[ScriptSwap]) -> None:
    """Give modules what is theirs."""
    for module, own, _ in swaps:
        assign(module, '__dict__', own)
    for module, name, value, _ in scripts:
        setattr(module, name, value)
