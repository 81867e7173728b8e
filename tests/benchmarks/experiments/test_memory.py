"""Peaks of partitions in a shared memory: each counts the tensors that it would have on its own
device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.experiments.memory import peaks_by_partition, train_keeping_gradients
from tests.benchmarks import tiny
from tests.devices import places
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, SkipGenerator, Skippable, pop, skippable, stash

MIB = 2**20


@skippable(stash=['large'])
class Stash(Skippable):
    """Stash a large tensor, and go on with a small one."""

    def forward(self, x: torch.Tensor) -> SkipGenerator:
        yield stash('large', x * 2)
        return x[:, :1].clone()


@skippable(pop=['large'])
class Pop(Skippable):
    """Pop it, and look at one column only."""

    def forward(self, x: torch.Tensor) -> SkipGenerator:
        large = yield pop('large')
        return x + large[:, :1]


def peaks(devices, mode, columns=MIB // 4):
    """Return the peaks of three partitions; the skip from first to last has 4 MiB."""
    level = Namespace()
    model = nn.Sequential(Stash().isolate(level), nn.Linear(1, 1), Pop().isolate(level))
    gpipe = GPipe(model, [1, 1, 1], devices=devices, chunks=1, checkpoint=mode)
    x = torch.rand(4, columns)

    def step(turns=None):
        gpipe(x).sum().backward()

    step()
    return peaks_by_partition(list(gpipe.partitions), step)


def test_a_skip_counts_where_it_is():
    for devices in (['cpu'] * 3, ['cpu:0', 'cpu:1', 'cpu:2']):
        first, middle, last = peaks(devices, 'never').values()
        assert 4 * MIB <= first < 4.01 * MIB
        assert middle < 1000
        assert 4 * MIB <= last < 8.01 * MIB
        # It is not counted twice for the one that stashed it, whose memory it leaves.
        assert peaks(devices, 'always')[0] < 4.01 * MIB


@pytest.mark.parametrize('letters', ['cc', pytest.param('aa', marks=pytest.mark.accelerator)])
def test_the_output_of_a_partition_counts_for_the_next_one(letters):
    wide = nn.Sequential(
        nn.Linear(1, MIB // 4, bias=False), nn.Flatten(), nn.Linear(MIB // 4, 1, bias=False)
    )
    gpipe = GPipe(wide, [1, 2], devices=places(letters), chunks=2, checkpoint='always')
    x = torch.rand(8, 1).to(gpipe.devices[0])
    found = peaks_by_partition(list(gpipe.partitions), lambda turns: gpipe(x))
    # 4 rows of a MiB each in the first, while it runs; all 8 are kept by the second.
    assert 4 * MIB <= found[0] < 4.01 * MIB and 8 * MIB <= found[1] < 8.1 * MIB


@pytest.mark.parametrize('letter', ['c', pytest.param('a', marks=pytest.mark.accelerator)])
def test_gradients_of_the_loss_count_for_the_last_partition(letter):
    """Backward runs in another thread on an accelerator, where the first partition was last."""
    gpipe = GPipe(
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=2 * places(letter)
    )
    x = torch.rand(1, 1).to(gpipe.devices[0])
    job = SimpleNamespace(
        partitions=list(gpipe.partitions),
        optimizers=[],
        forward=lambda: gpipe(x).repeat(1, MIB // 4).exp().sin().sum(),
    )

    def steps(turns):
        for _ in range(2):
            train_keeping_gradients(job, turns)

    first, last = peaks_by_partition(job.partitions, steps).values()
    assert first < 1000 and last >= 3 * MIB


@pytest.mark.slow
def test_peaks_on_workers_are_near_the_peaks_on_one_worker():
    """One worker takes a micro-batch through all partitions before the next, and needs less."""
    found = []
    for devices in (['cpu'] * 3, ['cpu:0', 'cpu:1', 'cpu:2']):
        torch.manual_seed(0)
        gpipe = GPipe(
            tiny.UNET.build(), [20, 20, 25], devices=devices, chunks=8, checkpoint='always'
        )
        x = torch.rand(8, 3, 64, 64)
        gpipe(x).sum().backward()
        found.append(
            peaks_by_partition(list(gpipe.partitions), lambda turns: gpipe(x).sum().backward())
        )
    alone, workers = found
    assert all(0.9 * alone[j] < workers[j] < 1.6 * alone[j] + 2**15 for j in range(3))
