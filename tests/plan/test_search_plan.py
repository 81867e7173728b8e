"""Plans as data, and as a table."""

import json
import random

import pytest
import torch
from torch import nn

from tests.plan.test_search import GPUS, made_up
from torchgpipe.balance import LayerProfile, Profile
from torchgpipe.plan import Link, Plan, plan
from torchgpipe.schedule import NAMES


def test_json_and_back():
    link = Link(0.1, 1e9)
    for links in (Link(), [[Link(), link], [link, Link()]]):
        found = plan(made_up(6), devices=GPUS, links=links)
        again = Plan.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
        assert again.to_dict() == found.to_dict()
        assert (again.seconds, again.bytes) == (found.seconds, found.bytes)
        assert [each.seconds for each in again.runners_up] == [
            each.seconds for each in found.runners_up
        ]


def test_something_else_is_not_a_plan():
    for change in [
        {'version': 2},
        {'balance': None},
        {'costs': {}},
        {'more': 1},
        {'schedule': 'none'},
        {'balance': [3, 3, 3]},
        {'devices': ['cuda:0']},
        {'devices': []},
        {'checkpoint': 'some'},
        {'order': 'x'},
        {'schedule': 'searched', 'order': '0F0,0B0'},
        {'chunks': 0},
        {'chunks': 2.5},
        {'batch_size': '16'},
        {'balance': [6, 0]},
        {'checkpoint': ['never', 'never']},
        {'schedule': 'searched', 'order': '0F0,0B0\n1B0,1F0'},
        {'schedule': 'interleaved', 'balance': [2, 2, 2]},
    ]:
        data = plan(made_up(6), devices=GPUS, chunks=[2]).to_dict()
        with pytest.raises(ValueError, match='this is not a plan'):
            Plan.from_dict({**data, **change})
        with pytest.raises(ValueError, match='this is not a plan'):
            Plan.from_dict([])


def test_a_plan_changes_nothing():
    """Generators, parameters, buffers, modes and the number of threads stay."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    model[2].eval()
    x = torch.rand(16, 4)

    def state():
        return [
            torch.get_rng_state().tolist(),
            random.getstate(),
            torch.get_num_threads(),
            [each.training for each in model.modules()],
            [x.grad for x in model.parameters()],
            [value.tolist() for value in model.state_dict().values()],
        ]

    before = state()
    for where in {'devices': ['cpu:0', 'cpu:1']}, {'mesh': 2, 'machine': 'H100', 'batch': 16}:
        plan(model, x, timeout=0.01, **where)
        assert state() == before


def test_backward_of_the_plain_call_has_all_threads(monkeypatch):
    """One thread runs it, so it is measured with all; other schedules with a worker's part."""
    threads, now = [], [4]

    def measure(*args, **options):
        threads.append(torch.get_num_threads())
        return Profile(
            (LayerProfile('0', 1.0, 8.0 / threads[-1], 0, 0, 0, 0, 0),) * 2, (), 8, 0, 'cpu'
        )

    monkeypatch.setattr('torchgpipe.plan.search.profile', measure)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: now[-1])
    monkeypatch.setattr(torch, 'set_num_threads', now.append)
    found = plan(
        nn.Sequential(*[nn.Linear(1, 1) for _ in range(2)]),
        torch.ones(8, 1),
        devices=['cpu:0', 'cpu:1'],
        chunks=[1],
        overhead={},
        checkpoints=['never'],
        schedules=['plain call', 'gpipe'],
    )
    assert threads == [2, 2, 4]
    assert {x.schedule: x.seconds for x in (found, *found.runners_up)} == {
        'plain call': 2.0 + 2 * 2.0,
        'gpipe': 2.0 + 2 * 4.0,
    }


def test_a_table():
    text = str(plan(made_up(6), devices=GPUS, chunks=[2]))
    assert all(name in text for name in ('plain call', *NAMES, 'bubble', 'cuda:1', '32 samples'))


def test_a_model_that_takes_no_time_is_as_fast_as_ever():
    layers = tuple(LayerProfile(str(k), 0.0, 0.0, 0, 0, 0, 0, 0) for k in range(4))
    found = plan(Profile(layers, (), 4, 0, 'cpu'), devices=['cpu:0', 'cpu:1'])
    assert (found.seconds, found.speed_up, found.bubble) == (0, 1, 0)
