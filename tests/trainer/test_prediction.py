"""Predictions of a training, from a measured block."""

from dataclasses import replace
from functools import partial

import pytest

from tests.trainer.test_train_gpt import options_of
from torchgpipe.base.devices import CPU
from torchgpipe.base.settings import Settings
from torchgpipe.trainer import prediction
from torchgpipe.trainer.planning import needs_of_ranks
from torchgpipe.trainer.train_gpt import build_layers, training_loss


def planned(config, settings):
    """Return the predictions for some settings, or the fastest plan."""
    loss = partial(training_loss, config)
    return prediction.plan_blocks(build_layers(config, 1), loss, config, CPU, settings)


def test_the_weight_of_embedding_and_head_is_counted_once_by_each_device(tmp_path):
    """The block between them is repeated, so the head's place is another one than measured."""
    config = options_of(tmp_path, '--vocab-size', 128, '--mock-data')

    def resident_bytes(*balance):
        devices = tuple(f'cpu:{rank}' for rank in range(len(balance)))
        settings = Settings('1f1b', balance, devices, 2, 'never', ())
        plan = planned(config, settings)
        return sum(stage.resident_bytes for stage in plan.costs.stages)

    weight = 128 * 16 * 8
    assert resident_bytes(1, 5) - resident_bytes(6) == prediction.ADAM * weight
    assert sum(planned(config, None).balance) == 6


def test_the_loss_is_predicted_with_the_last_layer(tmp_path):
    """Its scores take most of the memory, for a large vocabulary."""
    few, many = (
        options_of(tmp_path, '--vocab-size', size, '--mock-data') for size in (64, 64 * 64)
    )
    peaks = []
    for config in (few, many):
        stage = planned(config, prediction.settings_of(config)).costs.stages[-1]
        peaks.append(stage.activation_bytes)
    # The scores in float64, or their logarithms, for each token of the batch.
    assert peaks[1] - peaks[0] >= (64 - 1) * 64 * 8 * 16 * config.block_size


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)])
def test_memory_of_a_rank_is_near_the_memory_of_a_dry_run(tmp_path, mesh):
    data, pipe, tensor = mesh
    words = '--n-embd 64 --block-size 64 --vocab-size 512 --mock-data --dtype float32'
    config = options_of(
        tmp_path, *words.split(), '--data', data, '--pipe', pipe, '--tensor', tensor
    )
    predicted = max(planned(config, prediction.settings_of(config)).bytes.values())
    needs = needs_of_ranks(replace(config, dry_run=True))
    rehearsed = max(rank.total for rank in needs.ranks)
    print(mesh, predicted, rehearsed)
    assert predicted == pytest.approx(rehearsed, rel=0.2)
