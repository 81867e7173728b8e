"""The zoo: models of a library that is none, each with another end."""

import json
import os
import time

import pytest
import torch
from torch import nn

from benchmarks.experiments import zoo
from benchmarks.experiments.zoo.convert import Case, converted, ways_out
from benchmarks.experiments.zoo.libraries import LIBRARIES, Library, _mask
from benchmarks.experiments.zoo.train import differences, without_dropout
from torchgpipe import Arguments
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
        time.sleep(600)


class Ends(Gated):
    def forward(self, x):
        os._exit(3)


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.5),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 4),
        )

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


@pytest.mark.slow
def test_each_model_has_a_row(run, tmp_path, library, monkeypatch):
    in_process = zoo.in_process
    monkeypatch.setattr(
        zoo,
        'in_process',
        lambda case, name, train, patience: in_process(
            case, name, train, 2 if name == 'Hangs' else patience
        ),
    )
    command = 'zoo', '--library', 'timm', '--patience', 60, '--train', '--output', tmp_path
    code, out, _ = run(*command)
    assert code == 0
    rows = json.loads((tmp_path / 'zoo.json').read_text())['results']['rows']['timm']
    assert [*rows] == [*MODELS]
    assert rows['Normalized']['layers'] == 3
    assert max(rows['Normalized']['training'].values()) < 1e-10
    assert rows['Gated']['lines'] == ["leaves=['gate']"] and rows['Gated']['layers'] == 3
    assert 'the elements of a tensor' in rows['GoesByElements']['reason']
    assert rows['Hangs']['reason'] == 'it takes more than 2 s'
    assert rows['Ends']['reason'] == 'its process ended by 3'
    assert (
        f'timm {torch.__version__}, 5 of 5 models: 1 (20%) are converted as they are, '
        '1 with the line that the error names, and 3 are not. 2 were trained'
        in ' '.join(out.split())
    )
    assert 'Normalized (of a test)' in out and "leaves=['gate']" in out
    monkeypatch.setattr(zoo, 'in_process', None)  # There is nothing left to do.
    assert run(*command, '--missing')[:2] == (0, out)


def test_earlier_results_of_the_same_version_stay(run, tmp_path, library, monkeypatch):
    def convert(case, name, train, patience):
        row = {'layers': 1, 'skips': 0, 'lines': [], 'seconds': 0.1, 'largest': None}
        return {**row, 'training': {'2 partitions': 1e-12}} if train else row

    monkeypatch.setattr(zoo, 'in_process', convert)
    path = tmp_path / 'zoo.json'
    words = 'zoo', '--library', 'timm', '--output', tmp_path
    assert run(*words, '--train')[0] == run(*words, '--model', 'Gated')[0] == 0
    stored = json.loads(path.read_text())
    rows = stored['results']['rows']['timm']
    assert [*rows] == [*MODELS] and all('training' in row for row in rows.values())

    stored['results']['libraries']['timm']['version'] = 'older'
    path.write_text(json.dumps(stored))
    assert run(*words, '--model', 'Gated')[0] == 0
    rows = json.loads(path.read_text())['results']['rows']['timm']
    assert [*rows] == ['Gated'] and 'training' not in rows['Gated']


def test_training_sees_random_numbers_that_a_pipeline_draws_in_another_order():
    case = make('Normalized')
    assert max(differences(case, []).values()) > 1e-6
    without_dropout(case.model)
    found = differences(case, [])
    assert [*found] == [
        '2 partitions, plain call',
        '2 partitions, 1f1b',
        '3 partitions, plain call',
        '3 partitions, 1f1b',
    ]
    assert max(found.values()) < 1e-10


class Config:
    """One as models of transformers have it."""

    def __init__(self):
        self.hidden_dropout_prob, self.layer_norm_eps = 0.1, 0.1

    def to_dict(self):
        return vars(self)


def test_dropout_of_a_config_is_none_either():
    model = nn.Sequential(nn.Dropout(0.3), nn.MultiheadAttention(4, 2, dropout=0.2))
    model.config = Config()
    without_dropout(model)
    assert model[0].p == model[1].dropout == model.config.hidden_dropout_prob == 0
    assert model.config.layer_norm_eps == 0.1


class Steps:
    """Raise errors in turn, and record the settings of each call."""

    def __init__(self, monkeypatch, errors):
        self.errors, self.told = list(errors), []
        monkeypatch.setattr('benchmarks.experiments.zoo.convert.to_sequential', self)

    def __call__(self, model, sample, leaves):
        self.told.append([*leaves, model.calls, model.config.use_cache, sample.kwargs])
        if self.errors:
            raise ConversionError(self.errors.pop(0))
        return nn.Sequential(model)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.calls = Config(), 0
        self.config.use_cache = True

    def forward(self, x, use_cache=True):
        self.calls += 1


CACHE = 'go without it: model.config.use_cache = False, or use_cache=False in the call'
LEAF = "to_sequential(model, sample, leaves=['a', 'b.c']), which"
ONCE = 'call the model once before'
HEADS = 'Where it is for auxiliary heads, make it without them'


def cached():
    """Return a case whose model has heads, and one without."""
    case = Case(Cached(), lambda number: Arguments(number), Arguments)
    return case._replace(without_heads=lambda: case)


def test_lines_of_errors_are_tried_one_after_the_other(monkeypatch):
    steps = Steps(monkeypatch, [CACHE, CACHE, LEAF, ONCE])
    found = converted(cached())
    assert found.lines == [*ways_out(CACHE + LEAF, Cached()), ONCE] and len(found.lines) == 4
    no_cache = {'use_cache': False}
    assert steps.told == [
        [0, True, {}],
        [0, False, {}],
        [0, False, no_cache],
        ['a', 'b.c', 0, False, no_cache],
        ['a', 'b.c', 1, False, no_cache],
    ]
    assert found.leaves == ['a', 'b.c'] and found.case.small(2).kwargs == no_cache


@pytest.mark.parametrize(
    'name', ['activation_checkpointing_disable', 'gradient_checkpointing_disable']
)
def test_checkpoints_are_turned_off_in_any_version_of_transformers(monkeypatch, name):
    Steps(monkeypatch, ['with model.activation_checkpointing_disable() for'])
    case, calls = cached(), []
    setattr(case.model, name, lambda: calls.append(name))
    assert converted(case).lines == ['model.activation_checkpointing_disable()']
    assert calls == [name]


def test_options_absent_from_a_config_are_not_turned_off():
    message = 'model.config.use_mems = False, or model.config.use_cache = False'
    assert [*ways_out(message, Cached())] == ['model.config.use_cache = False']
    assert not [*ways_out(message, nn.ReLU())]


def test_a_model_is_made_again_without_heads(monkeypatch):
    Steps(monkeypatch, [CACHE, HEADS])
    case = cached()
    assert converted(case._replace(model=Cached())).case.model is case.model


@pytest.mark.parametrize('errors', [[LEAF, LEAF], ['leaves=[…]']])
def test_a_line_is_tried_once(monkeypatch, errors):
    Steps(monkeypatch, errors)
    with pytest.raises(ConversionError):
        converted(cached())


def test_a_mask_has_rows_of_several_lengths():
    assert _mask(None, 5).sum(1).tolist() == [16, 13, 10, 7, 16]


def test_a_library_that_is_not_there(run, tmp_path, monkeypatch):
    monkeypatch.setitem(LIBRARIES, 'timm', Library(['no_such_library'], list, make))
    code, out, err = run('zoo', '--library', 'timm', '--output', tmp_path)
    assert code and 'no_such_library' in err and err.count('\n') == 1 and not out


@pytest.mark.parametrize(
    'name, end', [('Gate', "; did you mean 'Gated'?\n"), ('xyz', 'libraries\n')]
)
def test_a_model_of_no_library(run, tmp_path, library, name, end):
    code, out, err = run(
        'zoo', '--library', 'timm', '--model', 'Gated', '--model', name, '--output', tmp_path
    )
    assert code == 2 and not out
    assert f"'--model': '{name}' is not a model" in err and err.endswith(end)
    assert err.count('\n') == 1 and not [*tmp_path.iterdir()]
