"""An action: what a device does at a time, in one stage, for one micro-batch."""
import re
from typing import NamedTuple

__all__ = ['Action', 'KINDS']

#: The kinds of actions. A whole backward is ``B``; or it comes in two halves, ``I`` and ``W``.
KINDS = {
    'F': 'forward',
    'R': 'recomputation of the activations that forward did not keep',
    'B': 'backward',
    'I': 'backward, gradients of inputs',
    'W': 'backward, gradients of weights',
}

_TEXT = re.compile(r'(\d+)([A-Z]+)(\d+)')


class Action(NamedTuple):
    """What is done, as PyTorch's pipelining writes it: stage, kind, micro-batch.

    >>> Action.parse('2F10')
    Action(stage=2, kind='F', micro_batch=10)
    >>> str(Action(2, 'F', 10))
    '2F10'
    """

    stage: int
    kind: str
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> 'Action':
        """Read an action; :exc:`ValueError` if it is none."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in KINDS:
            kinds = ', '.join(f'{kind} ({what})' for kind, what in KINDS.items())
            raise ValueError(f'{text.strip()!r} is no action: stage, kind and micro-batch, as in '
                             f'0F3, where kinds are {kinds}')
        return cls(int(match[1]), match[2], int(match[3]))

    def __str__(self) -> str:
        return f'{self.stage}{self.kind}{self.micro_batch}'
