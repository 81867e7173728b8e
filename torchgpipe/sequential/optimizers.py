"""Optimizer state by names: from a model to its layers, and back.

::

    optimizer of the model     0  1  2  3         parameters by numbers, in an order of its own
                               │  │  │  │
    names of the model         a  b  c  d
                               │  │  │  │
    optimizer of the layers    1  3  0  2
"""
from collections.abc import Iterable, Mapping
from itertools import chain, count
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.sequential.parts import NamedLayer

__all__ = ['optimizer_state']

#: Keys of a group of parameters that are not options.
_PARAMETERS = ('params', 'param_names')


def optimizer_state(state_dict: Mapping[str, Any], module: nn.Module, target: Optimizer,
                    source: Optimizer | None = None) -> dict[str, Any]:
    """Return the state dict of an optimizer as one for another one, whose order is its own.

    One of them is of a model, the other one of what it was converted to.

    >>> import torch
    >>> from torchgpipe.sequential import to_sequential
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head, self.body = nn.Linear(4, 4), nn.Linear(4, 4)
    ...
    ...     def forward(self, x):
    ...         return self.head(self.body(x))
    >>> net = Net()
    >>> layers = to_sequential(net, torch.rand(2, 4))
    >>> source = torch.optim.SGD(net.named_parameters(), lr=0.1, momentum=0.9)
    >>> target = torch.optim.SGD(layers.parameters(), lr=0.5, momentum=0.9)
    >>> target.load_state_dict(optimizer_state(source.state_dict(), layers, target))
    >>> target.param_groups[0]['lr']
    0.1

    Args:
        state_dict: The state dict, with the names of parameters (PyTorch keeps them if an
            optimizer is made of ``named_parameters()``); otherwise say ``source``.
        module: The layers of the converted model, or the ``GPipe`` of them.
        target: The optimizer that it is for.
        source: The optimizer that it is of, or one that was made in the same way. Only its
            parameters count, which may be on the meta device.

    Raises:
        ValueError: Parameters have no names, or they are not those of the model, not the same in
            both, or in other groups; or the optimizer keeps what is of no parameter.
    """
    known = _Names(module)
    saved = state_dict['param_groups']
    given = known.keys(_with_parameters(saved, source), 'the state dict')
    wanted = known.keys(target.param_groups, 'the target')
    _check_same([*chain(*given)], [*chain(*wanted)], known)
    numbers = count()
    groups = [{**_options(own, given, saved, known), 'params': [next(numbers) for _ in own]}
              for own in wanted]
    saved_numbers = dict(zip(chain(*given), chain(*(group['params'] for group in saved))))
    parameters = chain(*(group['params'] for group in target.param_groups))
    state = {}
    for k, (key, parameter) in enumerate(zip(chain(*wanted), parameters)):
        found = state_dict['state'].get(saved_numbers[key])
        if found is not None:
            _check_state(found, parameter, known.names[key])
            state[k] = found
    return {'state': state, 'param_groups': groups}


class _Names:
    """What the parameters of a converted model are called: in the model, and in layers.

    A key is the id of a parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        #: One name of each.
        self.names: dict[int, str] = {}
        self._keys: dict[str, int] = {}
        for layer in module.children():
            if isinstance(layer, NamedLayer):
                for name, x in layer.named_parameters(remove_duplicate=False):
                    self.names.setdefault(id(x), name)
                    self._keys[name] = id(x)
        if not self.names:
            raise ValueError('names of parameters are those of a converted model: pass the layers '
                             'that to_sequential gave, or the GPipe of these, but not '
                             f'{type(module).__name__}, which has none')

    def keys(self, groups: Iterable[Mapping[str, Any]], what: str) -> list[list[int]]:
        """Return the keys of the parameters in some groups."""
        groups = [*groups]
        xs = [*chain(*(group['params'] for group in groups))]
        if all(isinstance(x, Tensor) and id(x) in self.names for x in xs):
            return [[*map(id, group['params'])] for group in groups]
        if not all(len(group.get('param_names', ())) == len(group['params']) for group in groups):
            raise ValueError(
                f'{what} has parameters that are not those of the converted model, or numbers of '
                'them, and no names: make the optimizers of named_parameters(). For a state dict '
                'without, pass source=…, an optimizer that is made as the one that it is of')
        names = [*chain(*(group['param_names'] for group in groups))]
        # Those of the model, or of layers by any numbers.
        found = [each for each in ([*map(self._keys.get, names)], [
            self._keys.get(name.partition('.')[2]) for name in names]) if None not in each]
        if not found or found[0] != found[-1]:
            foreign = [name for name in names
                       if not {name, name.partition('.')[2]} & {*self._keys}]
            raise ValueError(f'{what} has parameters that are not those of the model, or not '
                             f'under its names alone: {(foreign or names)[:5]} of {len(names)}')
        keys = iter(found[0])
        return [[next(keys) for _ in group['params']] for group in groups]  # type: ignore[misc]


def _with_parameters(saved: Iterable[Mapping[str, Any]], source: Optimizer | None
                     ) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict, with parameters if it has no names of these."""
    if source is None or all('param_names' in group for group in saved):
        return [*saved]
    sizes, own = ([len(group['params']) for group in groups]
                  for groups in (saved, source.param_groups))
    if sizes != own:
        raise ValueError(f'the state dict has groups of {sizes} parameters, and the source of '
                         f'{own}: make the source as the optimizer that the state dict is of')
    return [*source.param_groups]


def _options(own: list[int], given: list[list[int]], saved: list[Mapping[str, Any]],
             known: _Names) -> dict[str, Any]:
    """Return the options of the group in a state dict that has the same parameters."""
    for keys, group in zip(given, saved):
        if {*keys} == {*own}:
            return {name: x for name, x in group.items() if name not in _PARAMETERS}
    raise ValueError('the state dict has no group of the same parameters as that of the target '
                     f'with {[known.names[key] for key in own[:5]]}, which are {len(own)}: make '
                     'both optimizers with the same groups')


def _check_same(given: list[int], wanted: list[int], known: _Names) -> None:
    apart = sorted(known.names[key] for key in {*given} ^ {*wanted})
    if apart:
        raise ValueError(f'only one has {apart[:5]}, of {len(given)} parameters in the state dict '
                         f'and {len(wanted)} in the target: make both optimizers of the same ones')


def _check_state(state: Mapping[str, Any], parameter: Tensor, name: str) -> None:
    for key, value in state.items():
        if isinstance(value, (dict, list)):
            raise ValueError(f'the optimizer keeps a {type(value).__name__} as {key!r}, which may '
                             'be of all parameters in their order, as that of LBFGS is; make the '
                             'optimizer of the parameters of the model, in the same order')
        if isinstance(value, Tensor) and value.dim() == parameter.dim() and any(
                a not in (1, b) for a, b in zip(value.shape, parameter.shape)):
            raise ValueError(f'{key!r} of {name!r} has shape {tuple(value.shape)}, but the '
                             f'parameter {tuple(parameter.shape)}: the source is not made as the '
                             'optimizer that the state dict is of')
