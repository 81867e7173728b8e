"""Sequential models from modules of any form."""
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchgpipe.engine.scatter import cut, fit_rule
from torchgpipe.sequential.check import check
from torchgpipe.sequential.convert import convert
from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.leaf_modules import LeafLike
from torchgpipe.sequential.mixing import check_mixing
from torchgpipe.sequential.parts import Converted, original_names
from torchgpipe.sequential.stages import StageLike, make_stages
from torchgpipe.sequential.values import UNKNOWN
from torchgpipe.structure import flatten_nested

__all__ = ['ConversionError', 'from_stages', 'original_names', 'to_sequential']


def to_sequential(module: nn.Module, sample: Any = None, *, leaves: Iterable[LeafLike] = (),
                  batch_dim: Any = 0, check_sample: bool = True) -> nn.Sequential:
    """Make a sequential module of a module of any form, for :class:`~torchgpipe.GPipe`.

    Its forward is recorded for the sample, and cut into layers between calls with weights. A value
    that a later layer uses goes straight there, as a skip. The layers hold the submodules,
    parameters and buffers of the module itself, under their names with the number of a layer
    before them, such as ``3.blocks.0.norm.weight``.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
    ...         self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    ...
    ...     def forward(self, ids, mask=None):
    ...         x = self.embed(ids)
    ...         for block in self.blocks:
    ...             x = x + block(x).relu()
    ...         if mask is not None:
    ...             x = x * mask.unsqueeze(-1)
    ...         return self.head(x.mean(1))
    >>> ids = torch.randint(10, (4, 5))
    >>> layers = to_sequential(Net(), ids)
    >>> len(layers), layers(ids).shape, [*layers.state_dict()][1]
    (4, torch.Size([4, 3]), '1.blocks.0.weight')

    Args:
        module: The module. It is as it was afterwards, and shares what it has with the layers.
        sample: What it is called with: a tensor, any structure, or
            :class:`~torchgpipe.Arguments` for several, with two samples at least. Without one,
            less can be followed, and nothing is compared.
        leaves: Submodules that are leaf modules, called as one and not looked into: by names (with
            ``*`` for anything), classes, or themselves. Layers of PyTorch's are anyway; and so are
            modules whose program goes by the training mode, or changes grad mode or autocast.
        batch_dim: Where the batch is in the sample: see :class:`~torchgpipe.GPipe`.
        check_sample: Whether to compare outputs, gradients and buffers with those of the module,
            in training and in evaluation mode, for the sample and for a micro-batch of it; and
            whether the samples are mixed: outputs for halves of it are halves of that for it, and
            a loss is the mean or the sum of those for halves.

    Returns:
        The sequential module. Any batch size will do; where the program of the module goes by
        other sizes, by types or by values that are no tensors, it checks that these are as they
        were for the sample, and raises :exc:`ValueError` if they are not.

    Raises:
        ConversionError: The forward can not be followed: the message shows the line, and the way
            out. Or the numbers are not those of the module, or not those of micro-batches.
        TypeError: Something is of the wrong type.
        ValueError: The model has no such leaf, or the sample can not be cut into micro-batches.
    """
    converted = convert(module, UNKNOWN if sample is None else sample, leaves)
    if check_sample and sample is not None:
        _check(module, converted, sample, batch_dim,
               'Something goes by what a graph does not have, such as a global, an object that '
               'changes, or a tensor behind its back. Name the submodule as a leaf')
    return converted


def from_stages(module: nn.Module, stages: Iterable[StageLike], sample: Any, *,
                batch_dim: Any = 0, check_sample: bool = True) -> nn.Sequential:
    """Make a sequential module by hand: of functions that use a model's submodules.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
    ...         self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    ...
    ...     def forward(self, ids):
    ...         x = self.embed(ids)
    ...         for block in self.blocks:
    ...             x = block(x)
    ...         return self.head(x.mean(1))
    >>> net = Net()
    >>> layers = from_stages(net, [
    ...     net.embed,
    ...     *net.blocks,
    ...     lambda net, x: net.head(x.mean(1)),
    ... ], torch.randint(10, (4, 5)))
    >>> layers[3], [*layers.state_dict()][0]
    (Stage(<lambda>)(
      (head): Linear(in_features=8, out_features=3, bias=True)
    ), '0.embed.weight')

    Each function is called with the module and a value, which may be of any nesting; the first one
    with what the module is called with. In its layer, the module is the part of it that the
    function has used with the sample. A submodule is a function of a value by itself.

    Args:
        module: The module.
        stages: The functions, in order. To pickle the result, they are defined in a module of
            Python's, and not lambdas.
        sample, batch_dim, check_sample: As for :func:`to_sequential`.

    Raises:
        ConversionError: The stages do not give the numbers of the module.
        ValueError: A stage has parameters that are not the module's.
    """
    converted = make_stages(module, stages, sample)
    if check_sample:
        _check(module, converted, sample, batch_dim,
               'What differs in the output is made in the last stages; a gradient that differs '
               'first, of what a stage has left out')
    return converted


def _check(module: nn.Module, converted: Converted, sample: Any, batch_dim: Any, advice: str
           ) -> None:
    if any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        return  # There are no numbers to compare.
    tensors, structure = flatten_nested(sample)
    batches, sizes, _ = cut(sample, 2, fit_rule(batch_dim, sample, converted))
    whole, halves = structure(tensors), [batch.value for batch in batches]
    check(module, converted, whole, halves[0], advice)
    if len(halves) > 1:
        check_mixing(module, whole, halves, sizes, batch_dim)
