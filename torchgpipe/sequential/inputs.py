"""What a converted model is called with: the arguments of the original's forward."""
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from torchgpipe.structure import Arguments, Structure, flatten_nested

__all__ = ['Inputs', 'arguments_of', 'called_with', 'signature_of']


class Inputs:
    """Take the tensors out of arguments, as they were taken out of the sample's.

    Args:
        signature: That of the original's forward.
        names: The parameters that get values, if there is no sample.
        structure: How the arguments are put together from tensors, if there is one.
        number: Of how many.
    """

    def __init__(self, signature: inspect.Signature, names: Sequence[str] = (),
                 structure: Structure | None = None, number: int = 0) -> None:
        self.signature = signature
        self._names = tuple(names)
        self._structure = structure
        self._number = number

    def __deepcopy__(self, memo: dict[int, Any]) -> 'Inputs':
        return self

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Give the tensors.

        Raises:
            TypeError: The original's forward does not take these arguments.
            ValueError: The sample had others: the program may be another one with these.
        """
        found = arguments_of(self.signature, args, kwargs)
        if self._structure is None:
            if found.keys() != {*self._names}:
                raise ValueError(
                    f'the model was converted without a sample, for {list(self._names)}, but is '
                    f'called with {list(found)}; convert it with a sample that has them: '
                    'to_sequential(model, Arguments(…))')
            return [found[name] for name in self._names]
        tensors, structure = flatten_nested(found)
        if len(tensors) != self._number or structure != self._structure:
            raise ValueError(
                'a converted model is called with arguments like those of the sample, which were '
                f'{_text(self._structure, self._number)}, but these are '
                f'{_text(structure, len(tensors))}; convert it with a sample like these')
        return tensors


def _text(structure: Structure, number: int) -> str:
    places: list[Any] = ['tensor'] * number
    return repr(structure(places)).replace("'tensor'", 'tensor')


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
                 ) -> dict[str, Any]:
    """Give arguments by the names of parameters, without those that are the default."""
    bound = signature.bind(*args, **kwargs).arguments
    parameters = signature.parameters
    return {name: value for name, value in bound.items()
            if value is not parameters[name].default}


def signature_of(module: nn.Module) -> inspect.Signature:
    """Give the signature of a module's forward, without annotations, which may not be pickled."""
    found = inspect.signature(module.forward)
    return found.replace(
        parameters=[each.replace(annotation=inspect.Parameter.empty)
                    for each in found.parameters.values()],
        return_annotation=inspect.Signature.empty)


def called_with(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the arguments and keywords that a sample stands for."""
    if type(sample) is Arguments:
        return sample.args, sample.kwargs
    return (sample,), {}
