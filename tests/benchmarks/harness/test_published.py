"""The published tables: their ratios, and balances that fit their models."""

import re

import pytest
import torch

from benchmarks.harness.experiment import OURS
from benchmarks.harness.published import EXPERIMENTS


def test_ratios_of_the_published_speeds():
    for name, expected in (
        ('resnet101-speed', [1, 0.853, 1.414, 2.774, 4.294]),
        ('amoebanetd-speed', [1, 1.539, 1.773, 1.004, 1.666, 2.709, 0.932, 2.621, 4.953]),
        ('unet-speed', [1, 0.858, 1.246, 2.352, 3.105]),
    ):
        experiment = EXPERIMENTS[name]
        ratios = [experiment.published_ratio(setting, OURS) for setting in experiment.settings]
        assert ratios == pytest.approx(expected, abs=6e-4), name


def test_a_source_without_a_figure_has_no_ratio():
    experiment = EXPERIMENTS['amoebanetd-memory']
    assert [experiment.published_ratio(setting, OURS) for setting in experiment.settings] == [
        None
    ] * 5
    assert experiment.published_ratio(experiment.settings[1], 'GPipe paper') == pytest.approx(
        7.26 / 7.31
    )


@pytest.mark.slow
def test_balances_fit_their_models():
    lengths = {}
    for experiment in EXPERIMENTS.values():
        for setting in experiment.settings:
            if setting.model not in lengths:
                with torch.device('meta'):
                    lengths[setting.model] = len(setting.model.build())
            assert sum(setting.balance) in (0, lengths[setting.model]), setting
            number = re.fullmatch(r'pipeline-(\d)|n(\d)m\d+', setting.name)
            assert not number or str(len(setting.balance)) in number.groups(), setting


def test_settings_of_an_ablation_differ_in_the_disabled_part():
    assert [len(setting.off) for setting in EXPERIMENTS['unet-timeline'].settings] == [3, 2, 1, 0]
    assert len({setting.balance for setting in EXPERIMENTS['unet-timeline'].settings}) == 1


def test_scaled_sizes_are_sizes_that_the_models_take():
    for experiment in EXPERIMENTS.values():
        assert experiment.scaled_resolution(1) == experiment.resolution
        assert experiment.scaled_resolution(0.01) == 64
        assert experiment.scaled_resolution(0.6) % 32 == 0
        for setting in experiment.settings:
            assert setting.scaled_batch(1) == setting.batch and setting.scaled_batch(0.001) >= 1
