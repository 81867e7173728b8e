"""A timeline of a training step: work that may be concurrent, without measuring time."""

from collections import defaultdict
from unittest.mock import patch

import torch
from torch import nn

from tests import accelerator
from torchgpipe import GPipe, is_recomputing

WIDTH = 3


class Timeline:
    """Events in the streams of the work, by kind of work and device, in the order of the queue."""

    def __init__(self):
        self.events = defaultdict(list)

    def mark(self, what, device):
        """Note that something is queued on the current stream of a device."""
        event = torch.accelerator.current_stream(device).record_event()
        self.events[what, device.index].append(event)

    def run(self, tied=False, schedule=None, **options):
        """Do a step with three micro-batches on three devices, which are checkpointed.

        Args:
            tied: Whether the first and the last device share a parameter.
            schedule: The schedule of a step; the plain call by default. options: Options of the
            pipeline.
        """
        to, copy = torch.Tensor.to, torch.Tensor.copy_

        def moved(x, *args, **kwargs):
            y = to(x, *args, **kwargs)
            if {x.device.type, y.device.type} == {'sim'} and x.device != y.device:
                self.mark(f'to {y.device.index} from', x.device)
            elif x.is_pinned():
                self.mark('from the host', y.device)
            return y

        def copied(x, y, *args, **kwargs):
            copy(x, y, *args, **kwargs)
            if x.is_pinned():
                self.mark('to the host', y.device)

        model = nn.Sequential(*[Marked(self) for _ in range(3)])
        if tied:
            model[2].weight = model[0].weight
        gpipe = GPipe(model, [1, 1, 1], chunks=3, checkpoint='always', **options)
        with patch.object(torch.Tensor, 'to', moved), patch.object(torch.Tensor, 'copy_', copied):
            x = torch.ones(3, WIDTH, device='sim:0')
            if schedule is None:
                gpipe(x).sum().backward()
            else:
                gpipe.step(
                    x, None, lambda output, _: output.sum(), normalizer=1, schedule=schedule
                )
        return self

    def is_free(self, what, of, after=0):
        """Return whether one does not wait for the other, with so many micro-batches between."""
        waiting, over = self.events[what], self.events[of]
        assert len(waiting) == len(over) == 3
        return not any(map(accelerator.is_ordered, over, waiting[after:]))


class Mark(torch.autograd.Function):
    """An identity that is on the timeline."""

    @staticmethod
    def forward(ctx, x, timeline):
        ctx.timeline = timeline
        timeline.mark('recomputation' if is_recomputing() else 'forward', x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.timeline.mark('backward', grad.device)
        return grad.clone(), None


class Marked(nn.Linear):
    """A layer that is on a timeline."""

    def __init__(self, timeline):
        super().__init__(WIDTH, WIDTH)
        self.timeline = timeline

    def forward(self, x):
        return Mark.apply(super().forward(x), self.timeline)
