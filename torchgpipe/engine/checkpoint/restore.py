"""Restore the state of layers from a first pass while its recomputation runs.

What that changes must not stay changed. So while it runs, each module has another dictionary of
attributes::

                               first pass of the cell     later     recomputation       afterwards
    module.__dict__            its own                              another             its own
    training                                                        as in first pass
    a buffer that changes      start ─────▶ end           …         a copy of start     as it was
    what does not change       the same at all times
"""
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import nn

from torchgpipe.engine.checkpoint.attributes import OWN
from torchgpipe.engine.checkpoint.layer_state import CellState, Layers, Restore, with_grad
from torchgpipe.engine.memory import Memories, versions
from torchgpipe.engine.substitute import Swap, substituted
from torchgpipe.private import unseen
from torchgpipe.structure import Slot

__all__ = ['run_on']

T = TypeVar('T')

_NONE: dict[str, Restore] = {}

#: Sets an attribute of a module, without what `nn.Module` makes of that.
assign = object.__setattr__


def run_on(state: CellState, function: Callable[[], T]) -> T:
    """Run a recomputation on what the first pass found."""
    layers = state.layers
    with layers.lock:
        if state.lost is not None or versions(state.told) != state.versions:
            _raise_changed(state)
        memories: Memories = {}
        with unseen():
            found = [(module, module.__dict__, _attributes_for(state, module, training, memories))
                     for module, training in layers.plain]
            swaps = [Swap(partial(assign, module, '__dict__', attributes),
                          partial(assign, module, '__dict__', own))
                     for module, own, attributes in found]
            for module, training in layers.scripts:
                swaps += _script_swaps(state, module, training, memories)
        with substituted(swaps):
            try:
                return function()
            finally:
                if layers.observed.asks_phase:
                    # What layers have set that know in which pass they did stays.
                    for _, own, attributes in found:
                        own.update((name, value) for name, value in attributes.items()
                                   if name not in OWN)


def _raise_changed(state: CellState) -> None:
    if state.lost is not None:
        raise RuntimeError(
            f'{_name(state.layers, state.lost)} was written to by its layer in a checkpointed '
            'micro-batch, as was never seen before in this mode, so its value from before is '
            'not there for the recomputation. Call the model again: from now on it is kept.')
    slot, expected, version = next(
        (slot, before, after) for slot, before, after
        in zip(state.places, state.versions, versions(state.told)) if before != after)
    raise RuntimeError(
        f'{_name(state.layers, slot)} has been modified by an inplace operation between forward '
        f'and backward (it is at version {version}; expected version {expected}), so a '
        'checkpointed micro-batch cannot be recomputed. Call backward before the '
        "optimizer's step, or use checkpoint='never'.")


def _name(layers: Layers, slot: Slot) -> str:
    """Name a parameter or a buffer."""
    prefix = next(name for name, module in layers.modules[0].named_modules() if module is slot[0])
    kind = 'parameter' if slot[1] in slot[0]._parameters else 'buffer'
    return f"{kind} '{prefix}.{slot[1]}'"


def _attributes_for(state: CellState, module: nn.Module, training: bool, memories: Memories
                    ) -> dict[str, Any]:
    """Return the attributes of a module for a recomputation."""
    now = module.__dict__
    mutated = state.attributes.get(module)
    attributes = {**now} if mutated is None else _restored(mutated, now, memories)
    attributes['training'] = training
    attributes.update(state.layers.hooks[module])
    attributes['_parameters'] = parameters = {**now['_parameters']}
    for name, (parameter, requires_grad) in state.layers.own[module].items():
        parameters[name] = parameter if parameter.requires_grad is requires_grad \
            else with_grad(parameter, requires_grad)
    if module in state.parameters:
        parameters.update(_restored(state.parameters[module], parameters, memories))
    buffers = state.buffers.get(module)
    attributes['_buffers'] = {} if buffers is None else _restored(
        buffers, now['_buffers'], memories)
    return attributes


def _restored(restores: dict[str, Restore], now: dict[str, Any], memories: Memories
              ) -> dict[str, Any]:
    return {name: restore(now.get(name), memories) for name, restore in restores.items()}


def _script_swaps(state: CellState, module: nn.Module, training: bool, memories: Memories
                  ) -> Iterator[Swap]:
    """Yield the same for a module of TorchScript, attribute by attribute."""
    def swap(name: str, value: Any) -> Swap:
        return Swap(partial(setattr, module, name, value),
                    partial(setattr, module, name, getattr(module, name)))

    yield swap('training', training)
    own = {name: with_grad(parameter, requires_grad)
           for name, (parameter, requires_grad) in state.layers.own[module].items()}
    for now, restores in ((module._parameters, state.parameters.get(module, _NONE)),
                          (module._buffers, state.buffers.get(module, _NONE))):
        for name, tensor in now.items():
            if name in restores:
                yield swap(name, restores[name](tensor, memories))
            elif own.get(name, tensor) is not tensor:
                yield swap(name, own[name])
    for name, restore in state.attributes.get(module, _NONE).items():
        yield swap(name, restore(getattr(module, name), memories))
