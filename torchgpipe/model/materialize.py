"""Initialize a model on the meta device layer by layer, and put each layer on its device.

:func:`materialize` gives values to one layer after the other::

                            by reset_parameters()              from weights
    built on meta           names and shapes, no memory        the same
    1. allocate a layer     on the CPU
    2. reset its modules    from the CPU's generator
    3. move it              to its device
    4. the next layer
    5. load                                                    on its device: `model.loader`

Initial values are drawn on the CPU, so they depend neither on devices nor on the balance.
(Generators of two devices with one seed would give layers on both the same values.) Modules are
reset in the order of constructors, inner modules first. If weights are given, only tensors outside
of the state dict are reset, such as buffers that are not persistent.

[Note: Values of the constructor]
A constructor may change values after its parts have reset theirs. Then resets alone give other
values than the constructor, without an error. Three rules prevent this:

1. A function of the user, ``init``, runs for each module after the resets.
2. Without ``init``, a module of a Transformers model is initialized by the model's
   ``_init_weights``, as Transformers does. A converted model is dissolved, so its layers keep a
   copy of the model on the meta device. The function sees this copy, with the tensors of one layer
   in their places.
3. Otherwise, a tensor is refused if the constructor has not written to it as often as the resets.
   PyTorch counts writes to tensors on the meta device as to any other. More writes mean other
   values. Fewer writes mean a copy, or a parameter that replaced the first one. A module of
   Transformers without its model is refused as well. Writes to ``x.data`` are not counted, so they
   are not detected. With rule 2, a tensor is refused if it was written to after the model's
   constructor.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import CPU, rng_states, set_rng_states
from torchgpipe.base.private import RESETS
from torchgpipe.base.structure import is_plain
from torchgpipe.engine.streams import no_context
from torchgpipe.model.adapters import (
    adapter_layers,
    is_adapter_layer,
    part_of_adapter,
    reset_adapters,
)
from torchgpipe.model.loader import Loader
from torchgpipe.model.pretrained import pretrained_class
from torchgpipe.model.slots import FirstSlots, TensorSlot, like, put, slots_in
from torchgpipe.sequential.parts import NamedLayer, with_part

#: How many tensors an error names at most.
_MOST = 3


def materialize(
    module: nn.Sequential,
    devices: Sequence[torch.device],
    loader: Loader | None = None,
    around: Callable[[str, nn.Module], AbstractContextManager[Any]] | None = None,
    init: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Give initial values to tensors on the meta device, except the ones that a loader will load.

    These stay on the meta device, so that they can be split before they have memory. Each layer
    gets its values within ``around(name, layer)``. After its resets, ``init`` is called with each
    of its modules, inner ones first.

    Raises:
        ValueError: A tensor cannot get a value.
    """
    first_slots: FirstSlots = {}
    helpless = []
    for name, layer in zip(module._modules, module):
        if init is None and not any(_pretrained(layer)):
            helpless += _Resets(layer, _loaded_later(loader, name, layer), first_slots).helpless
        for slot in slots_in(layer):
            if slot.tensor.is_meta:
                first_slots[id(slot.tensor)] = slot
    if helpless:
        raise _without_value(module, helpless)
    first_slots = {}
    for (name, layer), device in zip(module._modules.items(), devices):
        assert layer is not None
        with no_context if around is None else around(name, layer):
            _give_values(name, layer, device, loader, first_slots, module, init)
            if isinstance(layer, NamedLayer):
                layer.__dict__.pop('original', None)


@contextmanager
def seeded(seed: int, i: int, device: torch.device = CPU) -> Iterator[Callable[[], bool]]:
    """Draw the random numbers of layer ``i`` independently of other layers.

    Yields:
        A function that returns whether the layer drew any on the CPU or the device.
    """
    before = rng_states([device])
    # The seeds of consecutive layers are far apart, like separate streams of a generator.
    number = (seed * 0x9E3779B97F4A7C15 + i * 0xD1B54A32D192ED03) % (1 << 63)
    torch.default_generator.manual_seed(number)
    if len(before) > 1:
        torch.get_device_module(device).manual_seed(number)
    start = rng_states([device])
    try:
        yield lambda: any(not x.equal(start[name]) for name, x in rng_states([device]).items())
    finally:
        set_rng_states([device], before)


def _give_values(
    name: str,
    layer: nn.Module,
    device: torch.device,
    loader: Loader | None,
    first_slots: FirstSlots,
    module: nn.Sequential,
    init: Callable[[nn.Module], Any] | None,
) -> None:
    """Give values to one layer."""
    loaded = _loaded_later(loader, name, layer)
    plan = _Resets(layer, loaded, first_slots)
    ids_of_loaded = {id(x) for x in loaded if is_plain(x)}
    slots = []
    for slot in slots_in(layer):
        if slot.tensor.is_meta and id(slot.tensor) not in ids_of_loaded:
            slots.append(slot)
    ids_of_adapters = _ids_of_adapters(layer)

    _allocate(slots, CPU if plan.needed else device)
    more: list[Callable[[], Any]] = []
    if init is not None:
        for part in _parts_first(layer):
            more.append(partial(init, part))
    elif plan.needed:
        more += _pretrained(layer)
    if plan.needed:
        more += _adapter_resets(layer)
    forgotten, changed = plan.reset(more)
    if forgotten:
        raise _without_value(module, forgotten)
    # PEFT writes more often to its tensors than their own modules do.
    changed = [slot for slot in changed if id(slot.tensor) not in ids_of_adapters]
    if changed and init is None:
        raise _other_values(module, changed)
    _move(slots, device, first_slots)


def _original(layer: nn.Module) -> nn.Module | None:
    """Return the model that a layer is a part of, or the layer."""
    return layer.original if isinstance(layer, NamedLayer) else layer


def _pretrained(layer: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield the calls that initialize a layer of a Transformers model, in the model's order."""
    kind = pretrained_class()
    whole = _original(layer)
    if kind is None or whole is None:
        return
    wholes = dict(whole.named_modules(remove_duplicate=False))
    if not any(isinstance(module, kind) for module in wholes.values()):
        return
    modules = dict(with_part(whole, layer).named_modules(remove_duplicate=False))
    for path in [*_paths_first(layer), '']:
        owner = _owner(wholes, path, kind)
        if owner is not None and not part_of_adapter(wholes, path):
            yield partial(owner._init_weights, modules[path])


def _owner(modules: Mapping[str, nn.Module], path: str, kind: type) -> Any:
    """Return the innermost module of a class that has the module with a name, or is it."""
    while not isinstance(modules[path], kind):
        if not path:
            return None
        path = path.rpartition('.')[0]
    return modules[path]


def _adapter_resets(layer: nn.Module) -> Iterator[Callable[[], Any]]:
    """Yield the calls that initialize the adapters in a layer of a model that PEFT has changed."""
    whole = _original(layer)
    if whole is None or not hasattr(whole, 'peft_config'):
        return
    inside = dict(layer.named_modules())
    for path, module in with_part(whole, layer).named_modules():
        if is_adapter_layer(module) and path in inside:
            yield partial(reset_adapters, whole, module)


def _ids_of_adapters(layer: nn.Module) -> set[int]:
    """Return the ids of the tensors of adapters in a layer."""
    whole = _original(layer)
    ids: set[int] = set()
    if whole is None or not adapter_layers(whole):
        return ids
    wholes = dict(whole.named_modules(remove_duplicate=False))
    for path, module in layer.named_modules(remove_duplicate=False):
        if part_of_adapter(wholes, path):
            for slot in slots_in(module, recurse=False):
                ids.add(id(slot.tensor))
    return ids


def _paths_first(module: nn.Module) -> list[str]:
    """Return the names of all modules within a module, each after the modules in it."""
    return [*dict(module.named_modules())][:0:-1]


def _listed(module: nn.Module, slots: list[TensorSlot]) -> str:
    names = {part: name for name, part in module.named_modules()}
    texts = []
    for part, name, _ in slots[:_MOST]:
        texts.append(f"'{names[part]}.{name}' of a {part._get_name()}")
    text = ', '.join(texts)
    if len(slots) > _MOST:
        text += f' and {len(slots) - _MOST} more'
    return text


def _without_value(module: nn.Module, slots: list[TensorSlot]) -> ValueError:
    return ValueError(
        f'nothing gives a value to {_listed(module, slots)}: a parameter or a buffer on the meta '
        'device gets one from weights=…, from init=…, a function of each module, or from '
        'reset_parameters() of its module, if that has no tensors elsewhere and knows their '
        'sizes. Pass one of them, or build that module on the CPU. Weights may have buffers that '
        'are in no state dict: ChainMap({name: tensor}, '
        'torchgpipe.model.weights.open_weights(path)).'
    )


def _other_values(module: nn.Module, slots: list[TensorSlot]) -> ValueError:
    return ValueError(
        'reset_parameters() would give other initial values than the constructor of the model '
        f'gives to {_listed(module, slots)}. Pass weights=…, or the function by which the model '
        'initializes each of its modules: init=function; init=lambda module: None keeps the '
        'values of reset_parameters(). (A deep copy of a model on the meta device is refused: '
        'it does not tell how the constructor first_slots its tensors.)'
    )


def _allocate(slots: Iterable[TensorSlot], device: torch.device) -> None:
    """Allocate memory for each slot, even if several have one tensor, as constructors do."""
    for module, name, x in slots:
        value = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
        _memory(value).fill_(_blank(x))
        setattr(module, name, like(x, value))


def _blank(x: Tensor) -> int:
    """Return the byte that fills a tensor before any write.

    It is zero in buffers, because a module may leave out a buffer that weights do not have. It
    makes parameters NaN.
    """
    return 0xFF if isinstance(x, nn.Parameter) else 0


def _is_blank(x: Tensor) -> bool:
    """Return whether a tensor has no values yet, even from writes that PyTorch does not count."""
    least, greatest = _memory(x).aminmax()
    return int(least) == int(greatest) == _blank(x)


def _memory(x: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _move(slots: Iterable[TensorSlot], device: torch.device, first_slots: FirstSlots) -> None:
    """Move tensors to a device; slots that shared a tensor get the first slot's tensor again."""
    for slot in slots:
        value = getattr(slot.module, slot.name).detach()
        put(slot, partial(value.to, device), first_slots)


class _Resets:
    """The modules of a layer to reset, and the tensors that need a reset."""

    def __init__(self, layer: nn.Module, loaded: Iterable[Any], first_slots: FirstSlots) -> None:
        self._loaded = {*map(id, loaded), *first_slots}
        self.needed = []
        for slot in slots_in(layer):
            x = slot.tensor
            has_value = id(x) in first_slots or id(x) in self._loaded and is_plain(x)
            if x.is_meta and not has_value:
                self.needed.append(slot)
        self._ids = {id(slot.tensor) for slot in self.needed}
        #: Tensors of modules of a Transformers model, without the model that initializes them.
        self._foreign: set[int] = set()
        if self.needed:
            for part in layer.modules():
                if _is_of_transformers(type(part).__module__):
                    self._foreign.update(id(slot.tensor) for slot in slots_in(part))
        #: The functions to call, inner modules first.
        self.resets: list[Callable[[], object]] = []
        #: Tensors that cannot get a value.
        self.helpless: list[TensorSlot] = []
        for module in _parts_first(layer):
            self._add(module)

    def _add(self, module: nn.Module) -> None:
        reset = None
        for name in RESETS:
            reset = reset or getattr(module, name, None)
        below = [slot.tensor for slot in slots_in(module)]
        # It may reset its parts as well, so none of their tensors may have a value.
        if reset and not self._ids.isdisjoint(map(id, below)) and all(map(self._is_free, below)):
            self.resets.append(reset)
            return
        for slot in slots_in(module, recurse=False):
            if id(slot.tensor) in self._ids:
                self.helpless.append(slot)

    def _is_free(self, x: Tensor) -> bool:
        """Return whether a reset may write to a tensor."""
        return is_plain(x) and (id(x) in self._ids or id(x) in self._loaded)

    def reset(
        self, more: Iterable[Callable[[], object]]
    ) -> tuple[list[TensorSlot], list[TensorSlot]]:
        """Reset the modules after their memory is allocated, and make more calls.

        Returns:
            The tensors that were not written to, and the tensors to which the constructor has
            given other values: [Note: Values of the constructor].
        """
        fresh = []
        for slot in self.needed:
            blank = getattr(slot.module, slot.name)
            if blank.numel():
                fresh.append((slot, blank, blank._version))
        with CPU:
            for reset in self.resets:
                reset()
            writes = [_writes_since(*item) for item in fresh]
            with torch.no_grad():
                for initialize in more:
                    initialize()

        forgotten = []
        changed = []
        for (slot, blank, version), resets in zip(fresh, writes):
            if self._has_changed(slot, resets, bool(more)):
                changed.append(slot)
            is_same = getattr(slot.module, slot.name) is blank and blank._version == version
            if is_same and _is_blank(blank):
                forgotten.append(slot)
        return forgotten, changed

    def _has_changed(self, slot: TensorSlot, resets: int | None, is_pretrained: bool) -> bool:
        """Return whether the constructor gave a tensor other values than resets do.

        Args:
            resets: The number of writes by resets; ``None`` if the tensor was removed.
            is_pretrained: Whether further functions initialize the modules.
        """
        if resets is None:
            return False
        if is_pretrained:
            return 0 < resets < _writes(slot.tensor)
        return resets != _writes(slot.tensor) or id(slot.tensor) in self._foreign


def _writes_since(slot: TensorSlot, blank: Tensor, version: int) -> int | None:
    """Return the number of writes to a slot's tensor since it was allocated."""
    now = getattr(slot.module, slot.name)
    if now is None:
        return None
    if now is blank:
        return int(now._version) - version
    return int(now._version)


def _writes(x: Tensor) -> int:
    """Return the number of writes to a tensor."""
    return 0 if x.is_inference() else x._version


@cache
def _is_of_transformers(name: str) -> bool:
    """Return whether a file defines a Transformers model, which initializes the modules in it."""
    kind = pretrained_class()
    if kind is None:
        return False
    for value in vars(sys.modules.get(name, sys)).values():
        is_model = isinstance(value, type) and issubclass(value, kind)
        if is_model and value.__module__ == name:
            return True
    return False


def _loaded_later(loader: Loader | None, name: str, layer: nn.Module) -> list[Any]:
    """Return the tensors of a layer that will be loaded."""
    return [] if loader is None else loader.targets(name, layer)


def _parts_first(module: nn.Module, done: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield a module after all modules in it, each once."""
    done = set() if done is None else done
    if module not in done:
        done.add(module)
        for child in module.children():
            yield from _parts_first(child, done)
        yield module
