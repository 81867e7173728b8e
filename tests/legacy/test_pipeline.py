"""The pipeline of torchgpipe 0.0.7: its clock, as literal schedules, and its runs."""

import threading

import pytest
import torch
from torch import nn

from tests.helpers import assert_same
from tests.skip.layers import Pop, Stash
from torchgpipe.gpipe import verify_module
from torchgpipe.microbatch import gather, scatter
from torchgpipe.pipeline import Pipeline, clock_cycles
from torchgpipe.skip.layout import SkipLayout


def test_clock_cycles():
    for m, n, expected in [
        (1, 1, [[(0, 0)]]),
        (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
        (3, 1, [[(0, 0)], [(1, 0)], [(2, 0)]]),
        (3, 3, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1), (0, 2)], [(2, 1), (1, 2)], [(2, 2)]]),
        (4, 2, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(3, 0), (2, 1)], [(3, 1)]]),
    ]:
        assert list(clock_cycles(m, n)) == expected


def test_the_check_of_a_module_has_its_old_place():
    verify_module(nn.Sequential(nn.ReLU()))
    with pytest.raises(TypeError):
        verify_module(nn.ReLU())


def test_a_pipeline_by_itself():
    before = set(threading.enumerate())
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double()
    x = torch.rand(5, 2, dtype=torch.double)
    for places in (None, [torch.device('cpu:0'), torch.device('cpu:1')]):
        batches = scatter(x, 2)
        Pipeline(batches, [model[:1], model[1:]], places, checkpoint_stop=1).run()
        assert_same([gather(batches)], [model(x)])
    assert set(threading.enumerate()) == before


def test_skips_are_found_in_the_layers_or_given():
    for layout in [None, SkipLayout(2, {(None, 'skip'): (0, 1)})]:
        partitions = [nn.Sequential(Stash()), nn.Sequential(Pop())]
        batches = scatter(torch.ones(2, 1), 2)
        Pipeline(batches, partitions, skip_layout=layout).run()
        assert gather(batches).tolist() == [[2], [2]], layout
