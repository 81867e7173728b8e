"""The accuracy experiment from end to end, on a few real images."""

import csv
import json
import shutil
from importlib import import_module

import pytest
import torch

from benchmarks.experiments.accuracy import train
from benchmarks.experiments.accuracy.images import write_pictures
from benchmarks.experiments.accuracy.train import learning_rate
from benchmarks.models import resnet101


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Let the model have an eighth of its channels."""
    monkeypatch.setattr(import_module('benchmarks.models.resnet101'), 'WIDTH', 8)


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Return a folder with 20 images for training and 10 for validation."""
    folder = tmp_path_factory.mktemp('images')
    write_pictures(folder, train=4, val=2)
    return folder


def rows_of(folder, setting):
    """Read a log."""
    with (folder / f'resnet101-accuracy-{setting}' / 'log.csv').open() as file:
        return [
            {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)
        ]


def without_speed(rows):
    """Drop the speed, which differs from run to run."""
    return [
        {name: value for name, value in row.items() if name != 'samples_per_second'}
        for row in rows
    ]


def arguments(images, output, *more, epochs=2):
    """Return a command line; a batch of 8 images of 64²."""
    words = f'--scale 0.03 --epochs {epochs} --workers 0 --setting pipeline-256'.split()
    return ['resnet101-accuracy', '--data', images, *words, '--output', output, *more]


@pytest.mark.slow
def test_training_and_resuming(run, images, tmp_path, monkeypatch):
    whole, halves = tmp_path / 'whole', tmp_path / 'halves'
    code, out, _ = run(*arguments(images, whole))
    assert code == 0 and 'pipeline-256' in out and '21.99' in out
    assert 'not ImageNet: 5 classes, 20 images' in out
    first, second = rows_of(whole, 'pipeline-256')
    assert (first['epoch'], second['epoch']) == (1, 2)
    assert second['train_loss'] < first['train_loss']
    assert 0 <= second['val_error'] <= 100 and second['val_error_top5'] == 0  # of 5 classes
    (result,) = json.loads((whole / 'resnet101-accuracy.json').read_text())['results']['settings']
    assert result['status'] == 'measured' and result['figure'] == second['val_error']

    one_epoch = train.Training.train

    def stop(self, epoch):
        if epoch == 1:
            raise KeyboardInterrupt
        return one_epoch(self, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, 'train', stop)
        code, out, err = run(*arguments(images, halves))
    assert code == 130 and 'Stopped' in err and 'pipeline-256' in out
    (result,) = json.loads((halves / 'resnet101-accuracy.json').read_text())['results']['settings']
    assert result['status'] == 'interrupted'
    assert without_speed(rows_of(halves, 'pipeline-256')) == without_speed([first])

    code, _, err = run(*arguments(images, halves))
    assert code == 1 and '--resume' in err and err.count('\n') == 1
    code, _, err = run(*arguments(images, halves, '--resume', '--seed', 1))
    assert code == 1 and 'another seed: 0, not 1' in err and err.count('\n') == 1
    code, _, _ = run(*arguments(images, halves, '--resume'))
    assert code == 0
    assert without_speed(rows_of(halves, 'pipeline-256')) == without_speed([first, second])


@pytest.mark.slow
def test_mixed_precision(run, tmp_path):
    write_pictures(tmp_path / 'images', train=1, val=1)
    code, _, _ = run(*arguments(tmp_path / 'images', tmp_path, '--dtype', 'float16', epochs=1))
    (row,) = rows_of(tmp_path, 'pipeline-256')
    assert code == 0 and row['train_loss'] < 20
    kept = torch.load(tmp_path / 'resnet101-accuracy-pipeline-256/checkpoint.pt')
    torch.manual_seed(0)
    before, after = resnet101(5).state_dict()['0.weight'], kept['model']['0.weight'].cpu()
    assert before.dtype == after.dtype
    # Gradients in float16 may overflow at first; then the step is skipped and the scale is halved.
    assert not torch.equal(before, after) or kept['scaler']['scale'] < 2**16


@pytest.mark.slow
def test_an_unreadable_image_is_named_in_one_line(run, images, tmp_path):
    folder = shutil.copytree(images, tmp_path / 'images')
    broken = next((folder / 'val').glob('*/*.png'))
    broken.write_bytes(broken.read_bytes()[:200])
    words = '--scale 0.03 --epochs 1 --setting baseline --workers 1'.split()
    code, _, err = run('resnet101-accuracy', '--data', folder, *words, '--output', tmp_path)
    line = err.splitlines()[-1]
    assert code == 1 and line.startswith(f"Error: '{broken}' is not an image"), err
    assert '--resume' in line


def test_images_that_are_not_there(run, tmp_path):
    code, _, err = run('resnet101-accuracy', '--data', tmp_path)
    assert code == 1 and 'train/<class>' in err and err.count('\n') == 1
    code, _, err = run('resnet101-accuracy')
    assert code == 2 and '--data' in err and err.count('\n') == 1


def test_the_learning_rate_grows_with_the_batch_and_falls_three_times():
    rates = [learning_rate(epoch / 90, 256) for epoch in (0, 5, 29.9, 30, 59.9, 60, 79.9, 80)]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001])
    assert learning_rate(0, 4096) == 0.1 and learning_rate(10 / 90, 4096) == pytest.approx(1.6)
    assert learning_rate(0, 64) == pytest.approx(0.025)
