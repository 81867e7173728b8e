"""Pipelines that a layer of another pipeline calls, without having them as a module."""

import copy
import threading

import pytest
import torch
from torch import nn

from tests.devices import cpus
from tests.equivalence import loss_of
from tests.helpers import assert_same, gradients
from torchgpipe import GPipe

SECONDS = 60


class Learning(nn.Linear):
    """A layer that trains another network with its input."""

    def __init__(self, train):
        super().__init__(4, 4)
        self.train_other = train

    def forward(self, x):
        self.train_other(x.detach())
        return super().forward(x)


def run(function):
    """Call a function in another thread, which may hang."""
    errors = []

    def call():
        try:
            function()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@cpus
def test_a_layer_that_takes_a_step_of_another_pipeline(devices):
    """In v0.21, the caller held the lock of the generator, and the inner workers waited for it."""
    for schedule in [None, '1f1b', 'zb-h1']:
        for places in [['cpu:0', 'cpu:1'], ['cpu', 'cpu']]:
            for number in [1, 2]:
                auxiliary = nn.Sequential(
                    nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)
                ).double()
                inner = GPipe(
                    copy.deepcopy(auxiliary), [2, 1], devices=places, chunks=2, checkpoint='never'
                )

                def train(x):
                    loss_of(auxiliary(x), x).backward()

                model = nn.Sequential(
                    *[nn.Linear(4, 4) if k < 2 - number else Learning(train) for k in range(2)]
                ).double()
                layers = nn.Sequential(
                    *[
                        nn.Linear(4, 4)
                        if k < 2 - number
                        else Learning(lambda x: inner.step(x, x, loss_of))
                        for k in range(2)
                    ]
                ).double()
                layers.load_state_dict(model.state_dict())
                outer = GPipe(layers, [1, 1], devices=devices(2), chunks=2, checkpoint='never')
                for _ in range(3):
                    x = torch.randn(4, 4, dtype=torch.double)
                    for part in x.chunk(2):
                        (loss_of(model(part), part) / 2).backward()
                    if schedule is None:
                        run(lambda: loss_of(outer(x), x).backward())
                    else:
                        run(lambda: outer.step(x, x, loss_of, schedule=schedule))
                    assert_same(gradients(outer), gradients(model))
                    assert_same(gradients(inner), gradients(auxiliary))


def test_layers_of_the_caller_are_refused():
    shared = nn.Linear(4, 4)
    inner = GPipe(nn.Sequential(nn.Linear(4, 4), shared), [1, 1], devices=['cpu:0', 'cpu:1'])

    class Calling(nn.Module):
        def forward(self, x):
            return inner(x)

    outer = GPipe(
        nn.Sequential(shared, Calling(), nn.Linear(4, 4)), [2, 1], devices=['cpu:0', 'cpu:1']
    )
    with pytest.raises(RuntimeError, match='whose partition 1 has layers of the calling part'):
        run(lambda: outer(torch.rand(4, 4)))
