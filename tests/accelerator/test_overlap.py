"""Concurrent work on four devices, by the events of a training step.

Kernels and copies take known times here, and the host takes none. So only the dependencies decide
when each begins.
"""

import threading
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.experiments.timeline.ablation import without
from tests import accelerator
from tests.marks import MODES
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe, is_recomputing
from torchgpipe.base.context import ThreadState
from torchgpipe.engine import plain_call
from torchgpipe.engine.checkpoint import samples
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.streams import no_context
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.timeline import record

pytestmark = pytest.mark.sim

#: Micro-batches and partitions.
M, N = 6, 4

#: Microseconds of a kernel and a copy.
FORWARD, BACKWARD, COPY = 2000, 4000, 1000


class Sleep(torch.autograd.Function):
    """Keep the device busy, in forward and in backward."""

    @staticmethod
    def forward(ctx, x):
        accelerator.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        accelerator.sleep(BACKWARD)
        return grad.clone()


class Busy(nn.Module):
    """A layer that does so."""

    def forward(self, x):
        return Sleep.apply(x)


@pytest.fixture(autouse=True)
def slow_copies():
    """Let copies take a time."""
    accelerator.set_copy_time(COPY)
    yield
    accelerator.set_copy_time()


class Timeline:
    """Times of a training step: `(start, end)` by micro-batch and partition.

    Attributes:
        forward, recomputation, backward: Of cells.
        copies: Of a micro-batch to a partition.
        gradients: Of copies of its gradient to a partition.
    """

    def __init__(self, mode, first=nn.Tanh, last=nn.Tanh):
        layers = [layer for _ in range(N) for layer in (Busy(), nn.Tanh(), nn.Tanh(), nn.Tanh())]
        layers[1], layers[-1] = first(), last()
        # PyTorch numbers nodes by thread, and backward prefers high numbers. In a new thread they
        # do not depend on the tests before this one.
        thread = threading.Thread(target=self._run, args=[nn.Sequential(*layers), mode])
        thread.start()
        thread.join()

    def _run(self, model, mode):
        gpipe = GPipe(model, [4] * N, chunks=M, checkpoint=mode)
        x = torch.rand(M, 3, device='sim:0', requires_grad=True)

        def step():
            gpipe(x).sum().backward()

        for _ in range(2):
            step()
        with record(gpipe) as timeline:
            step()
        self._recorded = timeline.copies
        self.forward, self.recomputation, self.backward = (
            {
                (action.micro_batch, action.stage): (start, end)
                for _, action, start, end in timeline.actions
                if action.kind == kind
            }
            for kind in 'FRB'
        )

    def _copies(self, j):
        """Return those to a partition, of batches first, then of gradients in their order."""
        return [(each.start, each.end) for each in self._recorded if each.target == j]

    @property
    def copies(self):
        return {(i, j): self._copies(j)[i] for i, j in product(range(M), range(1, N))}

    @property
    def gradients(self):
        return {(i, j): self._copies(j)[-1 - i] for i, j in product(range(M), range(N - 1))}


def beside(a, b):
    """Return whether two things are in flight at the same time."""
    return a[0] < b[1] and b[0] < a[1]


def forward_is_a_pipeline(timeline):
    """While a partition works on a micro-batch, the one before it works on the next one."""
    forward = timeline.forward
    assert all(
        beside(forward[i, j], forward[i + 1, j - 1]) for i, j in product(range(M - 1), range(1, N))
    )


def backward_is_a_pipeline(timeline):
    """While a partition works on a micro-batch, the one behind it works on the one before."""
    backward, again = timeline.backward, timeline.recomputation
    assert all(
        beside(backward[i, j], backward[i - 1, j + 1])
        or (i - 1, j + 1) in again
        and beside(backward[i, j], again[i - 1, j + 1])
        for i, j in product(range(1, M), range(N - 1))
    )


def copies_run_beside_forward(timeline):
    """While a micro-batch is copied, both partitions work on others."""
    forward, copies = timeline.forward, timeline.copies
    assert all(
        beside(copies[i, j], forward[i + 1, j - 1]) and beside(copies[i, j], forward[i - 1, j])
        for i, j in product(range(1, M - 1), range(1, N))
    )


def gradients_are_copied_beside_backward(timeline):
    """While a gradient is copied, the partition that gave it works on the micro-batch before."""
    backward, again, copies = timeline.backward, timeline.recomputation, timeline.gradients
    assert all(
        beside(copies[i, j], again.get((i - 1, j + 1), backward[i - 1, j + 1]))
        for i, j in product(range(1, M), range(N - 1))
    )


def one_micro_batch_at_a_time(timeline):
    """A partition recomputes no micro-batch before it is done with the one that comes first."""
    backward, again = timeline.backward, timeline.recomputation
    assert all(
        backward[i + 1, j][1] <= again.get((i, j), backward[i, j])[0]
        for i, j in product(range(M - 1), range(N))
    )


def gradients_are_copied_beside_recomputations(timeline):
    """While the gradient of a micro-batch is copied to a partition, that recomputes it.

    With the last one it is done by then, as it has nothing else to do after forward.
    """
    again, copies = timeline.recomputation, timeline.gradients
    assert all(beside(copies[i, j], again[i, j]) for i, j in product(range(M - 1), range(N - 1)))
    assert all(
        again[M - 1, j][1] <= copies[M - 1, j][0] for j in range(N - 1) if (M - 1, j) in again
    )


def recomputations_wait_for_no_gradient(timeline):
    """A micro-batch is recomputed while the partition behind still computes its gradient."""
    again, backward = timeline.recomputation, timeline.backward
    assert again and all(
        start < backward[i, j + 1][1] for (i, j), (start, _) in again.items() if j < N - 1
    )


FOR_ALL = [
    forward_is_a_pipeline,
    backward_is_a_pipeline,
    one_micro_batch_at_a_time,
    copies_run_beside_forward,
    gradients_are_copied_beside_backward,
]
FOR_CHECKPOINTS = [gradients_are_copied_beside_recomputations, recomputations_wait_for_no_gradient]


def test_concurrent_and_exclusive_kernels():
    for mode in MODES:
        timeline = Timeline(mode)
        for promise in FOR_ALL if mode == 'never' else FOR_ALL + FOR_CHECKPOINTS:
            promise(timeline)


def test_with_skips():
    timeline = Timeline('except_last', lambda: Stash(lambda x: (x, x.tanh())), Pop)
    for promise in (forward_is_a_pipeline, backward_is_a_pipeline, one_micro_batch_at_a_time):
        promise(timeline)


def others_bring(which):
    """Let new threads copy the inputs of cells, and so number the nodes of these copies."""
    copy = PlainCall._copy

    def copy_in_a_thread(pipeline, i, prev_j, next_j, tensors):
        if not which(prev_j, next_j):
            return copy(pipeline, i, prev_j, next_j, tensors)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(copy(pipeline, i, prev_j, next_j, tensors))
        )
        thread.start()
        thread.join()
        return found[0]

    return patch.object(PlainCall, '_copy', copy_in_a_thread)


def others_bring_everything():
    """Let workers copy nothing."""
    return others_bring(lambda prev_j, next_j: True)


def others_bring_skips():
    """Let workers copy batches only."""
    return others_bring(lambda prev_j, next_j: next_j - prev_j > 1)


@contextmanager
def host_waits_for_cells():
    """Serialize cells, and let the host wait for each."""
    send = PlainCall._send

    def send_and_wait(pipeline, i, j, *args):
        send(pipeline, i, j, *args)
        torch.accelerator.synchronize(j)

    with (
        patch.object(PlainCall, '_send', send_and_wait),
        patch.object(ThreadState, 'is_serialized', True),
    ):
        yield


def host_waits_for_samples():
    """Let the host wait until it can look at samples of outputs."""
    return patch.object(samples, '_to_host', lambda elements: elements.to('cpu'))


def copies_on_the_compute_stream():
    """Let copies wait in the stream of the computation."""
    return without(['streams'])


def nodes_on_the_compute_stream():
    """Let the nodes behind a cell belong to the compute stream: see engine/plain_call.py."""
    return patch.object(plain_call, 'use_stream', lambda stream: no_context)


#: Each removed feature, and the property that it breaks.
WHY = [
    (host_waits_for_cells, forward_is_a_pipeline),
    (host_waits_for_samples, copies_run_beside_forward),
    (copies_on_the_compute_stream, copies_run_beside_forward),
    (copies_on_the_compute_stream, gradients_are_copied_beside_backward),
    (others_bring_everything, backward_is_a_pipeline),
    (nodes_on_the_compute_stream, gradients_are_copied_beside_recomputations),
    (nodes_on_the_compute_stream, recomputations_wait_for_no_gradient),
]


def test_why():
    for mutation, promise in WHY:
        with mutation():
            timeline = Timeline('always')
        with pytest.raises(AssertionError):
            promise(timeline)


def layers_that_keep_the_host_busy():
    """Return layers that stash and pop, of which the last recomputation waits for another one.

    Partition 3 has not queued all of its backward then before partition 0 recomputes micro-batch
    M-2. So nodes that autograd defers until it has nothing else to do there come too late.
    """
    recomputed = threading.Semaphore(0)

    @skippable(stash=['skip'])
    class StashAndTell(nn.Module):
        times = 0

        def forward(self, x):
            self.times += is_recomputing()
            if self.times % M == 2:
                recomputed.release()
            yield stash('skip', x)
            return x.tanh()

    @skippable(pop=['skip'])
    class PopAndWait(nn.Module):
        times = 0

        def forward(self, x):
            self.times += is_recomputing()
            if is_recomputing() and self.times % M == 0:
                assert recomputed.acquire(timeout=60)
            return x + (yield pop('skip'))

    return StashAndTell, PopAndWait


def test_why_with_skips():
    one_micro_batch_at_a_time(Timeline('always', *layers_that_keep_the_host_busy()))
    with others_bring_skips():
        timeline = Timeline('always', *layers_that_keep_the_host_busy())
    with pytest.raises(AssertionError):
        one_micro_batch_at_a_time(timeline)
