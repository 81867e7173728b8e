"""A recomputation on its own: the state that layers see, and the objects that it releases."""

import gc

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.steps import loss_of
from tests.helpers import in_partitions, memory_of, on_first
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe, is_checkpointing, is_recomputing, no_recompute
from torchgpipe.engine.checkpoint.selection import Selection


@devices
def test_layers_can_ask_for_the_pass(devices):
    log = []

    class Ask(nn.Linear):
        def forward(self, x):
            log.append((is_checkpointing(), is_recomputing()))
            return super().forward(x)

    gpipe = in_partitions(devices, Ask(4, 4), nn.Linear(4, 4), chunks=3, checkpoint='except_last')
    for _ in range(2):
        gpipe(on_first(gpipe, torch.rand(3, 4))).sum().backward()
        assert log == [(True, False), (True, False), (False, False), (False, True), (False, True)]
        assert not is_checkpointing() and not is_recomputing()
        log.clear()


@devices
@pytest.mark.parametrize('grad', [False, True])
def test_a_cell_that_has_no_graph_is_not_checkpointed(devices, grad):
    told = []

    class Ask(nn.Linear):
        def forward(self, x):
            told.append(is_checkpointing())
            return super().forward(x)

    model = nn.Sequential(Ask(4, 4).requires_grad_(not grad), nn.Linear(4, 4))
    gpipe = GPipe(model, [1, 1], devices=devices(2), checkpoint='always')
    with torch.set_grad_enabled(grad):
        gpipe(torch.rand(2, 4, device=devices.first))
    assert told == [False]


@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_backward_frees_inputs_also_while_the_loss_is_there(devices, mode):
    given = []

    class Seen(nn.Linear):
        def forward(self, x):
            given.append(memory_of(x))
            return super().forward(x)

    gpipe = in_partitions(devices, nn.Linear(4, 4), Seen(4, 4), chunks=2, checkpoint=mode)
    loss = gpipe(on_first(gpipe, torch.rand(4, 4))).sum()
    assert not any(memory.expired() for memory in given)
    loss.backward()
    assert given and all(memory.expired() for memory in given)


@devices
def test_unused_results_computed_ahead_are_freed_by_backward(devices):
    """Also where a layer keeps a part of the graph alive."""
    made, kept = [], []

    class Aside(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            aside = y.exp()
            if is_recomputing():
                made.append(memory_of(aside))
            else:
                kept.append(aside)
            return y

    gpipe = in_partitions(
        devices.distinct, Aside(4, 4), nn.Linear(4, 4), chunks=2, checkpoint='always'
    )
    x = on_first(gpipe, torch.rand(4, 4))
    gpipe.step(x, x.to(gpipe.devices[-1]), loss_of)
    assert len(made) == len(kept) == 2 and all(memory.expired() for memory in made)


@pytest.mark.slow
@devices
def test_a_step_frees_inputs_of_recomputations_even_if_a_part_of_the_graph_stays(devices):
    kept = []

    class Aside(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            aside = y.exp()
            if not is_recomputing():
                kept.append(aside)
            return y

    gpipe = GPipe(
        nn.Sequential(no_recompute(nn.Linear(4, 4)), Aside(4, 4)),
        [2],
        devices=devices(1),
        chunks=2,
        checkpoint='always',
    )
    x = on_first(gpipe, torch.rand(4, 4))
    for call in (lambda: gpipe.step(x, x, loss_of), lambda: gpipe(x).sum().backward()):
        call()
        gc.collect()
        assert kept and not any(type(item) is Selection for item in gc.get_objects())
        with pytest.raises(RuntimeError, match='second time') as error:
            kept.pop().sum().backward()
        assert any('come of one recomputation' in note for note in error.value.__notes__)


def test_a_cell_whose_output_gets_no_gradient_is_not_run_again():
    calls = []

    class Count(nn.Linear):
        def forward(self, x):
            calls.append(is_recomputing())
            return super().forward(x)

    class Detach(nn.Linear):
        def forward(self, x):
            return super().forward(x.detach())

    gpipe = in_partitions(['cpu', 'cpu'], Count(4, 4), Detach(4, 4), chunks=2, checkpoint='always')
    x = torch.rand(4, 4)
    gpipe.step(x, x, loss_of)
    assert calls == [False, False]


def test_a_change_of_the_input_is_noticed_also_where_no_sample_is():
    class Change(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(256))

        def forward(self, x):
            x[1] += 1
            return x * self.weight

    gpipe = in_partitions(['cpu'], Change(), chunks=1, checkpoint='always')
    loss = gpipe(torch.rand(256)).sum()
    with pytest.raises(RuntimeError, match='changed the input of the partition in place'):
        loss.backward()


def test_a_skip_that_is_the_batch_is_so_again():
    same = []

    def add(x, skip):
        same.append(x is skip)
        return x + skip

    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), Stash(), Pop(add), nn.Linear(4, 4)),
        [2, 2],
        devices=['cpu', 'cpu'],
        checkpoint=['never', 'always'],
    )
    gpipe(torch.rand(4, 4)).sum().backward()
    assert same == [True, True]
