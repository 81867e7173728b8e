"""An action of a device: one kind of work, in one stage, for one micro-batch; and its time."""
import re
from typing import NamedTuple

__all__ = ['Action', 'KINDS', 'Timed']

#: The kinds of actions. A whole backward is ``B``; or it is split into ``I`` and ``W``.
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


class Timed(NamedTuple):
    """An action, and when it ran: as a simulation predicts it, or as a recorder measured it.

    >>> timed = Timed(0, Action(0, 'F', 1), 0.25, 0.75)
    >>> str(timed.action), timed.end - timed.start
    ('0F1', 0.5)
    """

    #: Whose it is: a row of the schedule, a lane of a timeline.
    device: int
    action: Action
    #: In seconds, from the start of the step.
    start: float
    #: In seconds, from the start of the step.
    end: float
