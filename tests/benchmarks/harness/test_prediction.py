"""Predictions of the published speeds: by hand, from layers that cost the same."""

import json
from dataclasses import replace

import pytest

from benchmarks.experiments import speed
from benchmarks.experiments.speed import predict, step_seconds
from benchmarks.harness import page
from benchmarks.harness.experiment import Setting
from benchmarks.harness.report import written
from tests.benchmarks import tiny
from torchgpipe.balance import LayerProfile, Profile
from torchgpipe.schedule import NAMES


def profile(number, overhead=0.0):
    """Return a profile of 8 samples, with layers of 1 second forward and 2 seconds backward."""
    layer = LayerProfile('', 1.0, 2.0, 4, 0, 0, 0, 4, None, overhead, overhead)
    return Profile((layer,) * number, (), batch_size=8, input_bytes=4, device='cpu')


def setting(chunks, balance, checkpoint='never'):
    return Setting('', tiny.UNET, 8 * chunks, chunks, balance, checkpoint)


def test_the_model_by_itself():
    assert step_seconds(profile(4), setting(2, ())) == {'plain call': 24.0}
    # A second of each is the same for any batch.
    assert step_seconds(profile(4, 1.0), setting(2, ())) == {'plain call': 4 * (1 + 3)}
    assert step_seconds(profile(4, 1.5), setting(2, ())) == {'plain call': 4 * (1 + 2.5)}


def test_equal_partitions():
    found = step_seconds(profile(4), setting(4, (2, 2)))
    # A micro-batch takes 2 and 4 seconds in a partition, and there are 4 + 1 clocks.
    assert found['plain call'] == found['gpipe'] == found['1f1b'] == 5 * 6
    assert [*found] == ['plain call', *NAMES]
    # Half of a partition is there when a pipeline of twice as many stages begins.
    assert found['interleaved'] == 4 * 6 + 3
    assert found['zb-h1'] < found['1f1b']


def test_recomputations_come_before_gradients():
    found = step_seconds(profile(4), setting(4, (2, 2), 'always'))
    # The last recomputes the first of all; the other one while that computes gradients.
    assert found['plain call'] == found['gpipe'] == 5 * 2 + 5 * 6 - 2


def test_overheads_count_for_each_micro_batch():
    found = step_seconds(profile(4, 1.0), replace(setting(4, (2, 2)), batch=4))
    # A layer takes 1 + 0 and 1 + 1 / 8 seconds for a sample.
    assert found['1f1b'] == pytest.approx(5 * 2 * 2.125)


@pytest.mark.slow
def test_a_published_table(tmp_path, capsys, monkeypatch):
    options = tiny.options(tiny.SPEED, tmp_path, settings=tiny.SETTINGS[:2])
    predict(tiny.SPEED, options)
    out = capsys.readouterr().out
    assert 'At scale 0.5' in out and 'plain call' in out and '64²' in out
    assert (tmp_path / 'tiny-speed-predicted.png').read_bytes().startswith(b'\x89PNG')
    kept = json.loads((tmp_path / 'tiny-speed-predicted.json').read_text())['results']
    base, two = kept['settings']
    assert base['ratios'] == {'plain call': 1.0} and base['published']['a paper'] == 1.0
    assert {*two['ratios']} == {'plain call', *NAMES} and min(two['ratios'].values()) > 0
    assert two['published'] == {'torchgpipe 0.0.7': 1.5, 'a paper': 1.5}
    monkeypatch.setattr(page, 'RESULTS', tmp_path)
    text = '\n'.join(map(written, page._prediction('tiny-speed')))
    assert '| pipeline-2 | 2 | 4 |' in text and '--predict --seed 0 --scale 0.5`' in text
    assert page._prediction('nothing') == []


def test_a_prediction_refuses_options_of_a_training(run):
    for words in (['--dtype', 'float64'], ['--compile'], ['--schedule', '1f1b']):
        code, out, error = run('resnet101-speed', '--predict', *words)
        assert code == 2 and not out and error.count('\n') == 1
        assert f'{words[0]} is for a training, without --predict' in error


def test_ratios_are_medians_over_profiles_of_the_baseline(tmp_path, monkeypatch):
    samples = []
    overheads = iter([9.0, 0.0, 0.5, 1.0, 0.0])

    def count(model, sample, **options):
        samples.append((len(model), *sample.shape))
        return profile(len(model), next(overheads))

    monkeypatch.setattr(speed, 'profile', count)
    predict(tiny.SPEED, tiny.options(tiny.SPEED, tmp_path, settings=tiny.SETTINGS[1:]))
    assert samples == [(65, speed.BATCH, 3, 64, 64)] * speed.PROFILES

    results = json.loads((tmp_path / 'tiny-speed-predicted.json').read_text())['results']
    result = results['settings'][0]
    setting, base = tiny.SETTINGS[1], tiny.SPEED.baseline
    ratios = []
    for overhead in [9.0, 0.0, 0.5, 1.0, 0.0]:
        measured = profile(65, overhead)
        seconds = step_seconds(measured, setting)['1f1b']
        plain = step_seconds(measured, base)['plain call']
        ratios.append(plain / base.batch * setting.batch / seconds)
    assert result['ratios']['1f1b'] == pytest.approx(sorted(ratios)[2])
    assert result['lowest']['1f1b'] == pytest.approx(min(ratios))
