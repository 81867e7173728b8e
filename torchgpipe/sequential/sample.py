"""The sample of a submodule, from a call of the model around it."""
from typing import Any

from torch import nn

from torchgpipe.base.structure import Arguments, call
from torchgpipe.sequential.effects import (copied, copied_value, same_random_numbers, untouched,
                                           without_grad)

__all__ = ['sample_of']


class _Called(BaseException):
    """The submodule was called; the rest of the model's forward is not needed.

    It is no :exc:`Exception`, because a forward may catch these.
    """


def sample_of(model: nn.Module, submodule: nn.Module | str, sample: Any) -> Arguments:
    """Return the arguments that a submodule receives in a call of a model.

    They are a sample for :func:`to_sequential`, to run a part of a model as a pipeline, such as
    the language model of a model with images. A copy of the model runs up to the first call of the
    submodule, without gradients. The model, and the random numbers of PyTorch and Python, do not
    change.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.body = nn.Linear(8, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ...
    ...     def forward(self, x):
    ...         return self.body(self.first(x))
    >>> net = Net()
    >>> sample_of(net, net.body, torch.rand(2, 8)).args[0].shape
    torch.Size([2, 4])

    Args:
        model: The model.
        submodule: A submodule, or its name in the model.
        sample: An input of the model: a value, or :class:`~torchgpipe.Arguments`.

    Returns:
        The arguments, with copies of tensors.

    Raises:
        AttributeError: The model has no submodule of this name.
        ValueError: The module is not in the model, or the model does not call it for this sample.
    """
    name = submodule if isinstance(submodule, str) else _name_of(model, submodule)
    model.get_submodule(name)
    received: list[Arguments] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received.append(copied_value(Arguments(*args, **kwargs)))
        raise _Called

    with same_random_numbers():
        copy = copied(model)
        # Before hooks of the user, which run again when the submodule is converted.
        copy.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
        try:
            untouched(copy, lambda: without_grad(lambda _: call(copy, copied_value(sample))))
        except _Called:
            return received[0]
    raise ValueError(f"{type(model).__name__} does not call '{name}' for this sample. Pass a "
                     'sample with which it does, or name the submodule that it calls')


def _name_of(model: nn.Module, submodule: nn.Module) -> str:
    for name, module in model.named_modules():
        if module is submodule:
            return name
    raise ValueError(f'this {type(submodule).__name__} is not a submodule of the '
                     f'{type(model).__name__}; pass one of its modules, or its name')
