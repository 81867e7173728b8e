"""Names of converted models: those of the model, with the number of a layer before them.

::

    model         blocks.0.norm.weight                  embed.weight
    sequential    3.blocks.0.norm.weight                0.embed.weight, 7.embed.weight
                  ▲
                  the layer: what several layers use has a name in each of them

The number depends on how the model was cut into layers, so it does not count when a state dict is
loaded: names of the model are taken, and those with other numbers.
"""
from collections.abc import Mapping
from typing import Any

from torch import nn

from torchgpipe.split import Sequential, still_shared

__all__ = ['Converted', 'Named', 'original_names', 'own_names', 'to_own_names']


class Named(nn.Module):
    """A layer that has names of the model that it was made from."""


class Converted(Sequential):
    """A sequential module that was made from another module.

    Its layers hold the submodules, parameters and buffers of that module. ``load_state_dict``
    takes the names of the original, too.
    """

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True,
                        assign: bool = False) -> Any:
        """Load a state dict, with names of the original or of layers; what is shared stays so."""
        with still_shared(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _apply(self, fn: Any, recurse: bool = True) -> 'Converted':
        with still_shared(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        to_own_names(state_dict, prefix, self._modules)
        super()._load_from_state_dict(state_dict, prefix, *args)


def original_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Give the state dict of the original, of that of a converted model or a ``GPipe`` of it.

    >>> original_names({'0.embed.weight': 1, '7.embed.weight': 1, '7.norm.bias': 2})
    {'embed.weight': 1, 'norm.bias': 2}

    Args:
        state_dict: It has names with the number of a layer before them. Where several layers have
            a parameter in common, the last one's is given.

    Raises:
        ValueError: A name does not begin with a number.
    """
    found = {}
    for key, value in state_dict.items():
        number, _, name = key.partition('.')
        if not number.isdigit() or not name:
            raise ValueError(f"names of a converted model begin with the number of a layer, as in "
                             f"'0.{key}', but this state dict has '{key}'")
        found[name] = value
    return found


def own_names(layers: Mapping[str, nn.Module | None]) -> dict[str, list[str]]:
    """Give the names that layers have for each name of the model that they were made from."""
    own: dict[str, list[str]] = {}
    for number, layer in layers.items():
        if isinstance(layer, Named):
            for name in layer.state_dict(keep_vars=True):
                own.setdefault(name, []).append(f'{number}.{name}')
    return own


def to_own_names(state_dict: dict[str, Any], prefix: str, layers: Mapping[str, nn.Module | None]
                 ) -> None:
    """Give what is in a state dict the names that layers have for it, in place.

    Args:
        state_dict: Its names are those of the original, or of layers with other numbers.
        prefix: What stands before them.
        layers: The layers, by their numbers.
    """
    own = own_names(layers)
    if not own:
        return
    given = {key[len(prefix):] for key in state_dict if key.startswith(prefix)}
    of_original = given.issuperset(own)
    mine = {name for names in own.values() for name in names}
    renamed: dict[str, Any] = {}
    for name in given:
        number, _, rest = name.partition('.')
        if of_original and name in own:
            targets = own[name]
        elif name in mine:
            continue
        else:
            targets = own.get(name) or (own.get(rest, []) if number.isdigit() else [])
        if targets:
            value = state_dict.pop(prefix + name)
            renamed.update((prefix + target, value) for target in targets)
    state_dict.update(renamed)
