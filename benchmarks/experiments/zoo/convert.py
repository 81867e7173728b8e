"""Convert one model, if need be with the lines that errors name, and report the result."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe import Arguments
from torchgpipe.base.structure import call
from torchgpipe.sequential import ConversionError, to_sequential
from torchgpipe.skip.layout import DeclaresSkips

#: An error names one way out, or several for several causes.
MOST_LINES = 4


class Case(NamedTuple):
    """A model to convert.

    Attributes:
        model: The model with its default configuration, except for the changes in the note.
        sample: Returns its arguments, for a number of samples.
        small: Returns smaller arguments for training, which the model may refuse.
        note: Differences from the default.
        without_heads: Returns it without heads that are for training only, if it has some.
    """

    model: nn.Module
    sample: Callable[[int], Any]
    small: Callable[[int], Any]
    note: str = ''
    without_heads: Callable[[], Any] | None = None


class Found(NamedTuple):
    """The result of a conversion.

    Attributes:
        case: The case, as a line has changed it.
        layers: The layers.
        lines: The lines that errors named.
        leaves: The leaves in these lines.
        seconds: The time of the last conversion.
    """

    case: Case
    layers: nn.Sequential
    lines: list[str]
    leaves: list[str]
    seconds: float

    def row(self) -> dict[str, Any]:
        """Return its row of the table."""
        wholes: Sequence[Any] = self.layers.wholes  # type: ignore[assignment]
        with_parameters = [whole for whole in wholes if whole.share]
        largest = None
        if with_parameters:
            first = with_parameters[0]
            largest = {'kind': first.kind, 'share': first.share, 'why': in_short(first.why)}
        skips = 0
        for layer in self.layers:
            if isinstance(layer, DeclaresSkips):
                skips += len([*layer.stashable()])
        return {
            'lines': self.lines,
            'seconds': self.seconds,
            'layers': len(self.layers),
            'skips': skips,
            'largest': largest,
        }


def converted(case: Case, size: int = 2) -> Found:
    """Convert a model as it is; or by the lines that errors name, one after the other.

    Raises:
        ConversionError: There is no such line, or they do not help.
    """
    leaves: list[str] = []
    lines: list[str] = []
    while True:
        start = time.perf_counter()
        try:
            layers = to_sequential(case.model, case.sample(size), leaves=leaves)
        except ConversionError as error:
            ways = [way for way in ways_out(str(error), case.model) if way not in lines]
            if not ways or len(lines) == MOST_LINES:
                raise
            lines.append(ways[0])
            case = _taken(case, size, ways[0], leaves)
        else:
            return Found(case, layers, lines, leaves, time.perf_counter() - start)


#: Proposals of errors: words in them, and the lines that these stand for.
CALL_IT = 'call the model once before'
TURN_OFF = r'model\.config\.(\w+) = False'
NO_CACHE_IN_THE_CALL = 'use_cache=False in the call'
NO_CHECKPOINTS = 'model.activation_checkpointing_disable()'
NO_HEADS = 'auxiliary heads, make it without them'


def ways_out(message: str, model: nn.Module) -> Iterator[str]:
    """Yield the lines that an error names, and a model has to do with.

    >>> [*ways_out("name it: to_sequential(model, sample, leaves=['a.b']); or …", nn.ReLU())]
    ["leaves=['a.b']"]
    """
    if CALL_IT in message:
        yield CALL_IT
    for match in re.finditer(TURN_OFF, message):
        if hasattr(getattr(model, 'config', None), match[1]):
            yield match[0]
    for line in (NO_CACHE_IN_THE_CALL, NO_CHECKPOINTS, NO_HEADS):
        if line in message:
            yield line
    yield from re.findall(r"leaves=\['[^]]+'\]", message)


def _taken(case: Case, size: int, line: str, leaves: list[str]) -> Case:
    """Return a case that is as a line says, or note leaves."""
    model: Any = case.model
    if line == CALL_IT:
        with torch.no_grad():
            call(model, case.sample(size))
    elif off := re.fullmatch(TURN_OFF, line):
        setattr(model.config, off[1], False)
    elif line == NO_CACHE_IN_THE_CALL:
        return case._replace(
            sample=partial(_without_cache, case.sample), small=partial(_without_cache, case.small)
        )
    elif line == NO_CHECKPOINTS:
        # Older versions of transformers have the second one only.
        names = 'activation_checkpointing_disable', 'gradient_checkpointing_disable'
        next(getattr(model, name) for name in names if hasattr(model, name))()
    elif line == NO_HEADS and case.without_heads:
        changed: Case = case.without_heads()
        return changed
    else:
        leaves += re.findall("'([^']+)'", line)
    return case


def _without_cache(sample: Callable[[int], Arguments], size: int) -> Arguments:
    arguments = sample(size)
    return Arguments(*arguments.args, **arguments.kwargs, use_cache=False)


def reason(error: BaseException) -> str:
    r"""Return the message of an error in one line, without the folders of this machine.

    >>> reason(ValueError("it fails\n  /site-packages/timm/layers/norm.py, line 3"))
    'ValueError: it fails timm/layers/norm.py, line 3'
    """
    text = in_short(str(error))
    return text if isinstance(error, ConversionError) else f'{type(error).__name__}: {text}'


def in_short(text: str) -> str:
    """Return a text in one line, without the folders of this machine."""
    return re.sub(r'/\S*site-packages/', '', ' '.join(text.split()))
