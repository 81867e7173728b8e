"""From a module of any form to a sequential one, with its submodules, parameters and names."""
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.sequential.build import build
from torchgpipe.sequential.copies import copied, copied_value
from torchgpipe.sequential.cuts import cut
from torchgpipe.sequential.draws import same_random_numbers
from torchgpipe.sequential.errors import ConversionError, NeedsLeaf, line_of_error, refused
from torchgpipe.sequential.inputs import Inputs, arguments_of, called_with, signature_of
from torchgpipe.sequential.leaves import Leaf, Leaves
from torchgpipe.sequential.names import Converted
from torchgpipe.sequential.patches import one_at_a_time
from torchgpipe.sequential.record import Recorder
from torchgpipe.sequential.value import UNKNOWN
from torchgpipe.structure import call, flatten_nested, leaves_of, path_name

__all__ = ['convert']


def convert(module: nn.Module, sample: Any, leaves: Iterable[Leaf]) -> Converted:
    """Make a sequential module, without comparing it: see :func:`to_sequential`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f'a module is converted, not {type(module).__name__}')
    if isinstance(leaves, (str, type, nn.Module)):
        leaves = [leaves]
    if sample is not UNKNOWN:
        tensors, structure = flatten_nested(sample)
        sample = structure(tensors)  # without marks
    named = [_name_of(module, leaf) if isinstance(leaf, nn.Module) else leaf for leaf in leaves]
    with one_at_a_time, torch.inference_mode(False), torch.enable_grad():
        if sample is not UNKNOWN:
            _run(module, sample)  # It may raise by itself, and fill its caches.
        return _with_leaves(module, sample, named)


def _with_leaves(module: nn.Module, sample: Any, named: list[Any]) -> Converted:
    """Make it, with those modules among the leaves that turn out to have to be."""
    classes: set[type] = set()
    while True:
        try:
            return _converted(module, sample, named, classes)
        except NeedsLeaf as error:
            classes.update(error.classes)


def _name_of(module: nn.Module, leaf: nn.Module) -> str:
    name: str
    for name, each in module.named_modules():
        if each is leaf and name:
            return name
    raise ValueError(f'the model has no such submodule that could be a leaf: {leaf!r}')


def _converted(module: nn.Module, sample: Any, named: list[Any], classes: set[type]) -> Converted:
    recorder, inputs = _recorded(module, sample, named, classes, flipped=False)
    if recorder.modes_taken:
        recorder.check_training(_recorded(module, sample, named, classes, flipped=True)[0])
    steps = cut(recorder.graph, recorder.root, recorder.leaves)
    converted = Converted(*build(recorder.graph, steps, module, inputs, recorder.constants))
    converted.training = module.training
    return converted


def _recorded(module: nn.Module, sample: Any, named: list[Any], classes: set[type], flipped: bool
              ) -> tuple[Recorder, Inputs]:
    """Record a module, with the other training mode if that is wanted."""
    root = copied(module)  # It runs, and may be changed.
    for each in root.modules():
        each.training ^= flipped
    leaves = Leaves(root, named)
    leaves.classes.update(classes)
    recorder = Recorder(root, leaves)
    args, kwargs, inputs = _values(recorder, module, sample)
    try:
        recorder.record(args, kwargs)
        del args, kwargs
        recorder.end()
    except NeedsLeaf:
        raise
    except ConversionError:
        # What goes by the training mode may be to blame, and can be left to itself.
        taken = [type(x) for each in recorder.modes_taken for x in each.module]
        if taken:
            raise NeedsLeaf(*taken) from None
        raise
    except Exception as error:
        why = f'{type(error).__name__}: {error}'
        raise refused(root, f'it can not be followed ({why})',
                      line_of_error(error.__traceback__), recorder.inner) from error
    finally:
        recorder.let_go()
    return recorder, inputs


def _values(recorder: Recorder, module: nn.Module, sample: Any
            ) -> tuple[tuple[Any, ...], dict[str, Any], Inputs]:
    """Give what a forward is recorded with, and what takes that from arguments."""
    signature = signature_of(module)
    if sample is UNKNOWN:
        names = [name for name, each in signature.parameters.items()
                 if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL,
                                                                     each.VAR_KEYWORD)]
        bound = signature.bind_partial()
        bound.arguments.update((name, recorder.placeholder(name, UNKNOWN)) for name in names)
        return bound.args, bound.kwargs, Inputs(signature, names)
    args, kwargs = called_with(sample)
    given = arguments_of(signature, args, kwargs)
    tensors, structure = flatten_nested(given)
    inputs = Inputs(signature, structure=structure, number=len(tensors))
    names = ['_'.join(re.findall(r'\w+', path_name(leaf.path))) for leaf in leaves_of(given)
             if isinstance(leaf.value, Tensor)]
    # Each place is an argument of its own: in other calls another tensor may be there, or another
    # memory.
    values = [recorder.placeholder(name, x.detach().clone()) for name, x in zip(names, tensors)]
    bound = signature.bind_partial()
    bound.arguments.update(structure(values))
    return bound.args, bound.kwargs, inputs


def _run(module: nn.Module, sample: Any) -> None:
    with torch.no_grad(), same_random_numbers():
        call(copied(module), copied_value(sample))
