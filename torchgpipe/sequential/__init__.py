"""Sequential models from other modules."""
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from torchgpipe.base.structure import flatten_nested
from torchgpipe.engine.microbatches import check_rules, cut, fit_rule
from torchgpipe.sequential.check import check_conversion, check_mixing
from torchgpipe.sequential.convert import convert, is_on_meta
from torchgpipe.sequential.effects import UNKNOWN, copied, copied_value, without_grad
from torchgpipe.sequential.layer import called_with
from torchgpipe.sequential.leaf_modules import LeafLike
from torchgpipe.sequential.parts import (Converted, NamedLayer, Part, all_names, converted,
                                         optimizer_state, original_names, put, with_all_names)
from torchgpipe.sequential.patches import watched
from torchgpipe.sequential.refusals import ConversionError
from torchgpipe.training.losses import counts_of, with_counts

__all__ = ['ConversionError', 'from_stages', 'optimizer_state', 'original_names', 'to_sequential']

#: A function of a model and a value, or a submodule, which is a function of a value.
StageLike = Callable[..., Any] | nn.Module


def to_sequential(module: nn.Module, sample: Any = None, *, grain: str = 'block',
                  leaves: Iterable[LeafLike] = (), batch_dim: Any = 0, gather: Any = None,
                  check_sample: bool = True) -> nn.Sequential:
    """Make a sequential module of a module of any form, for :class:`~torchgpipe.GPipe`.

    Its forward is recorded for the sample, and cut into layers: its blocks, and calls with weights
    beside these. A value that a later layer uses goes straight there, as a skip. The layers hold
    the submodules, parameters and buffers of the module itself, under their names with the number
    of a layer before them, such as ``3.blocks.0.norm.weight``.

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
        grain: How fine it is cut. ``'block'``: not within a block, of those that are repeated one
            behind the other in a list, a dict or a sequential module, with two weights at least;
            elsewhere as ``'layer'``: once between two calls with weights. ``'operation'``:
            wherever it may be. Where there are fewer layers than partitions, a finer one helps.
        leaves: Submodules that are leaf modules, called as one and not looked into: by names (with
            ``*`` for anything), classes, or themselves. Layers of PyTorch's are anyway; and so are
            modules whose program goes by the training mode, or changes grad mode or autocast.
        batch_dim: Where the batch is in the sample: see :class:`~torchgpipe.GPipe`.
        gather: The rule that :class:`~torchgpipe.GPipe` is given, for numbers in the output such
            as losses. Its result for halves is compared with the module.
        check_sample: Whether to compare outputs, gradients and buffers with those of the module,
            in training and in evaluation mode, for the sample and for a micro-batch of it; and
            whether the samples are mixed: outputs for halves of it are halves of that for it, and
            a loss is the mean or the sum of those for halves, or is given by ``gather``.

    Returns:
        The sequential module. Any batch size will do; where the program of the module goes by
        other sizes, by types or by values that are no tensors, it checks that these are as they
        were for the sample, and raises :exc:`ValueError` if they are not. Its attribute ``wholes``
        has the modules that were not looked into, each with its share of the parameters and of the
        time of one forward, and the reason, the largest one first. One that has most of the
        parameters gives a warning.

    Raises:
        ConversionError: The forward cannot be followed: the message shows the line, and the way
            out. Or the numbers are not those of the module, or not those of micro-batches.
        TypeError: Something is of the wrong type.
        ValueError: The model has no such leaf, or the sample cannot be cut into micro-batches.
    """
    check_rules(batch_dim, gather)
    converted = convert(module, UNKNOWN if sample is None else sample, leaves, grain,
                        _one_of(module, sample, batch_dim))
    largest = next((each for each in converted.wholes if each.warns), None)
    if largest is not None:
        warnings.warn(f'most of {type(module).__name__} is in one of its {len(converted)} layers, '
                      f'so partitions cannot be even: {largest}. Let the part that is to blame '
                      'be a smaller submodule', stacklevel=2)
    if check_sample and sample is not None:
        _check(module, converted, sample, batch_dim, gather,
               'Something goes by what a graph does not have, such as a global, an object that '
               'changes, or a tensor behind its back. Name the submodule as a leaf')
    return converted


def from_stages(module: nn.Module, stages: Iterable[StageLike], sample: Any, *,
                batch_dim: Any = 0, gather: Any = None, check_sample: bool = True
                ) -> nn.Sequential:
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
        sample, batch_dim, gather, check_sample: As for :func:`to_sequential`.

    Raises:
        ConversionError: The stages do not give the numbers of the module.
        ValueError: A stage has parameters that are not the module's.
    """
    check_rules(batch_dim, gather)
    converted = _make_stages(module, stages, sample)
    if check_sample:
        _check(module, converted, sample, batch_dim, gather,
               'What differs in the output is made in the last stages; a gradient that differs '
               'first, of what a stage has left out')
    return converted


def _one_of(module: nn.Module, sample: Any, batch_dim: Any) -> Any:
    """Return one sample of a sample of several, if it can be cut."""
    try:
        batches, sizes, _ = cut(sample, sys.maxsize, fit_rule(batch_dim, sample, [module]))
    except (TypeError, ValueError):  # What checks the sample, says so.
        return UNKNOWN
    return batches[0].value if len(sizes) > 1 else UNKNOWN


def _check(module: nn.Module, converted: Converted, sample: Any, batch_dim: Any, gather: Any,
           advice: str) -> None:
    if is_on_meta(module):
        return  # There are no numbers to compare.
    tensors, structure = flatten_nested(sample)
    batches, sizes, _ = cut(sample, 2, fit_rule(batch_dim, sample, converted))
    whole, halves = structure(tensors), [batch.value for batch in batches]
    known = check_conversion(module, converted, halves, sizes[0], whole, advice)
    if len(halves) > 1:
        rule = with_counts(gather, iter(counts_of(gather, batches)))
        check_mixing(known, whole, halves, sizes, batch_dim, rule)


class Stage(Part, NamedLayer):
    """Call a function with a part of a model, which is this layer itself."""

    def __init__(self, root: nn.Module, function: Callable[..., Any], names: Iterable[str]
                 ) -> None:
        super().__init__(root, attributes=True)
        self._function = function
        put(self, root, names, attributes=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the function does."""
        return self._function(self, *args, **kwargs)

    def _get_name(self) -> str:
        return f'Stage({getattr(self._function, "__name__", type(self._function).__name__)})'


class _CallOf:
    """Call a submodule by its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return model.get_submodule(self.__name__)(*args, **kwargs)


def _make_stages(module: nn.Module, stages: Iterable[StageLike], sample: Any) -> Converted:
    """Return the sequential module, without comparing it: see :func:`from_stages`."""
    names = all_names(module)
    args, kwargs = copied_value(called_with(sample))
    root = copied(module)  # It runs, and may be changed.
    layers: list[nn.Module] = []
    for stage in stages:
        function = _function(module, stage)
        value, uses = _used(root, function, args, kwargs)
        layers.append(stage if isinstance(stage, nn.Module) and not isinstance(function, _CallOf)
                      else Stage(module, function, with_all_names(module, uses, names)))
        args, kwargs = (value,), {}
    return converted(layers, module, attributes=True)


def _function(module: nn.Module, stage: StageLike) -> Callable[..., Any]:
    if not isinstance(stage, nn.Module):
        if not callable(stage):
            raise TypeError('a stage is a function of the model and a value, or a submodule, not '
                            f'{stage!r}')
        return stage
    name = next((name for name, each in module.named_modules() if each is stage and name), '')
    if name:
        return _CallOf(name)
    if any(True for _ in (*stage.parameters(), *stage.buffers())):
        raise ValueError('a stage is a submodule of the model, or a function of it, but this '
                         f'{type(stage).__name__}, which has parameters, is not in it')
    return lambda _, *args: stage(*args)


def _used(root: nn.Module, function: Callable[..., Any], args: tuple[Any, ...],
          kwargs: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return what a function gives for a model, and the names of what it uses."""
    uses = _Uses(root)
    with watched(uses):
        uses.watches = True
        try:
            return without_grad(lambda _: function(root, *args, **kwargs)), [*uses.names]
        finally:
            uses.watches = False


class _Uses:
    """Note which submodules are called, and which parameters and buffers are read."""

    def __init__(self, root: nn.Module) -> None:
        self.watches = False
        self.names: dict[str, None] = {}
        self._paths = {module: f'{name}.' if name else '' for name, module in root.named_modules()}

    def called(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> Any:
        """Note a submodule that is called; what it uses goes with it."""
        if self._paths.get(module):
            self.names.setdefault(self._paths[module][:-1])
        self.watches = False
        try:
            return run(module, *args, **kwargs)
        finally:
            self.watches = True

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Note a parameter or a buffer; or a submodule, for the sake of its attributes."""
        if isinstance(found, nn.Module) and found in self._paths:
            self.names.setdefault(f'{self._paths[found]}training')
        elif isinstance(found, Tensor) and module in self._paths:
            self.names.setdefault(self._paths[module] + name)
        return found
