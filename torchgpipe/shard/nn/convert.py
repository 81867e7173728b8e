"""Conversion: put sharded layers in the place of plain ones."""
from collections import Counter
from collections.abc import Callable

from torch import nn

__all__ = ['convert']


def convert(module: nn.Module, kind: type[nn.Module],
            make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replace all layers of a kind within a module, or the module if it is one itself.

    A layer that stands in several places stays one.

    Raises:
        ValueError: A parameter of such a layer is that of another layer, too.
    """
    plain = [each for each in module.modules() if type(each) is kind]
    _refuse_shared(module, plain)
    made = {id(each): make(each) for each in plain}
    if id(module) in made:
        return made[id(module)]
    for parent in module.modules():
        for name, child in parent._modules.items():
            if id(child) in made:
                parent.register_module(name, made[id(child)])
    return module


def _refuse_shared(module: nn.Module, plain: list[nn.Module]) -> None:
    uses = Counter(id(parameter) for each in module.modules()
                   for parameter in each._parameters.values())
    for each in plain:
        for name, parameter in each.named_parameters(recurse=False):
            if uses[id(parameter)] > 1:
                raise ValueError(
                    f'the {name} of {each} is that of another layer, too, and would not be '
                    'after conversion. Give each a copy, convert, and let both have one parameter '
                    'again, as in head.weight = embedding.weight, if both are split along the '
                    'same dimension in memory')
