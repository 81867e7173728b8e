"""The zoo: models of a library that is none, each with another end."""
import json
import os
import time

import pytest
import torch
from torch import nn

from benchmarks.experiments import zoo
from benchmarks.experiments.zoo.architectures import _mask
from benchmarks.experiments.zoo.convert import Case, converted, ways_out
from benchmarks.experiments.zoo.libraries import LIBRARIES, Library
from benchmarks.experiments.zoo.train import differences, without_dropout
from torchgpipe.sequential import ConversionError


class Gate(nn.Module):
    def forward(self, x):
        return x.clamp(-9, 9) if x.abs().max() > 9 else x


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.gate, self.outside = nn.Linear(4, 8), Gate(), nn.Linear(8, 4)

    def forward(self, x):
        return self.outside(self.gate(self.inside(x)))


class GoesByElements(Gated):
    def forward(self, x):
        return super().forward(x if x.max() < 9 else -x)


class Hangs(Gated):
    def forward(self, x):
        time.sleep(60)


class Ends(Gated):
    def forward(self, x):
        os._exit(3)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5),
                                    nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return {'x': self.layers(x), 'table': None}


MODELS = {cls.__name__: cls for cls in (Normalized, Gated, GoesByElements, Hangs, Ends)}


def make(name):
    def small(number):
        return torch.rand(number, 3)

    return Case(MODELS[name](), lambda number: torch.rand(number, 4), small, 'of a test')


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setitem(LIBRARIES, 'timm', Library(['torch'], lambda: [*MODELS], make))


def test_each_model_has_a_row(run, tmp_path, library):
    code, out, _ = run('zoo', '--library', 'timm', '--patience', 20, '--train', '--output',
                       tmp_path)
    assert code == 0
    rows = {row['model']: row for row in json.loads(
        (tmp_path / 'zoo.json').read_text())['results']['rows']}
    assert [*rows] == [*MODELS]
    assert rows['Normalized']['layers'] == 3 and max(rows['Normalized']['training'].values()) == 0
    assert rows['Gated']['lines'] == ["leaves=['gate']"] and rows['Gated']['layers'] == 3
    assert 'the elements of a tensor' in rows['GoesByElements']['reason']
    assert rows['Hangs']['reason'] == 'it takes more than 20 s'
    assert rows['Ends']['reason'] == 'its process ended by 3'
    assert f'timm {torch.__version__}: 5 models, of which 1 (20%) are converted as they are, ' \
        '1 with the line that the error names, and 3 are not. 2 were trained' in out
    assert 'Normalized (of a test)' in out and "leaves=['gate']" in out
