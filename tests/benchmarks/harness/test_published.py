"""The published tables: their ratios, and balances that fit their models."""

import re

import pytest
import torch

from benchmarks.harness.experiment import OURS
from benchmarks.harness.published import EXPERIMENTS, UNET_TIMELINE


@pytest.mark.parametrize(
    'name, ratios',
    [
        ('resnet101-speed', [1, 0.853, 1.414, 2.774, 4.294]),
        ('amoebanetd-speed', [1, 1.539, 1.773, 1.004, 1.666, 2.709, 0.932, 2.621, 4.953]),
        ('unet-speed', [1, 0.858, 1.246, 2.352, 3.105]),
    ],
)
def test_ratios_of_the_published_speeds(name, ratios):
    experiment = EXPERIMENTS[name]
    found = [experiment.published_ratio(setting, OURS) for setting in experiment.settings]
    assert found == pytest.approx(ratios, abs=6e-4)


def test_a_source_without_a_figure_has_no_ratio():
    experiment = EXPERIMENTS['amoebanetd-memory']
    assert [experiment.published_ratio(setting, OURS) for setting in experiment.settings] == [
        None
    ] * 5
    assert experiment.published_ratio(experiment.settings[1], 'GPipe paper') == pytest.approx(
        7.26 / 7.31
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'model',
    sorted(
        {setting.model for experiment in EXPERIMENTS.values() for setting in experiment.settings},
        key=str,
    ),
    ids=str,
)
def test_balances_fit_their_models(model):
    with torch.device('meta'):
        number = len(model.build())
    settings = [
        setting
        for experiment in EXPERIMENTS.values()
        for setting in experiment.settings
        if setting.model == model
    ]
    assert {sum(setting.balance) for setting in settings} <= {0, number}
    for setting in settings:
        number = re.fullmatch(r'pipeline-(\d)|n(\d)m\d+', setting.name)
        if number:
            assert str(len(setting.balance)) in number.groups()


def test_settings_of_an_ablation_differ_in_what_is_off():
    assert [len(setting.off) for setting in UNET_TIMELINE.settings] == [3, 2, 1, 0]
    assert len({setting.balance for setting in UNET_TIMELINE.settings}) == 1


def test_scaled_sizes_are_sizes_that_the_models_take():
    for experiment in EXPERIMENTS.values():
        assert experiment.scaled_resolution(1) == experiment.resolution
        assert experiment.scaled_resolution(0.01) == 64
        assert experiment.scaled_resolution(0.6) % 32 == 0
        for setting in experiment.settings:
            assert setting.scaled_batch(1) == setting.batch and setting.scaled_batch(0.001) >= 1
