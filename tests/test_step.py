"""The schedule of a step, and the errors of a step."""

import copy

import pytest
import torch
from torch import nn

from tests.engine.steps import layers, loss_of, train
from torchgpipe import GPipe
from torchgpipe.schedule import Schedule, make


def test_a_step_is_for_training():
    for how in ['eval', 'no_grad', 'inference']:
        gpipe = GPipe(layers(), [4, 4], devices=['cpu'] * 2).train(how != 'eval')
        x = torch.randn(4, 4, dtype=torch.double)
        context = {
            'eval': torch.enable_grad,
            'no_grad': torch.no_grad,
            'inference': torch.inference_mode,
        }[how]
        with context(), pytest.raises(RuntimeError, match='a step computes gradients'):
            gpipe.step(x, x[:, :3], loss_of)


BAD = [
    (dict(schedule='2f2b'), "there is no schedule '2f2b'"),
    (dict(schedule=make('1f1b', 3, 4)), 'for 3 stages and 4 micro-batches'),
    (dict(schedule=make('1f1b', 2, 3)), 'for 2 stages and 3 micro-batches'),
    (dict(schedule=Schedule.parse('0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3')), 'no backward'),
    (dict(schedule=Schedule.parse('0F0,0B0\n1B0,1F0')), 'for which it waits'),
    (dict(schedule=make('interleaved', 1, 4, 2)), r'stages \[0, 1\] on one device'),
    (dict(target=torch.zeros(5, 3).double()), 'the target has 5 samples'),
    (dict(loss_fn=lambda output, target: output), r'of shape \(2, 3\)'),
    (dict(loss_fn=lambda output, target: 1.0), 'but gave float'),
    (dict(loss_fn=nn.MSELoss(reduction='sum')), 'normalizer=1'),
]


def test_bad_input():
    for options, message in BAD:
        gpipe = GPipe(layers(), [4, 4], devices=['cpu:0', 'cpu:1'], chunks=4)
        x = torch.randn(8, 4, dtype=torch.double)
        given = {'target': x[:, :3], 'loss_fn': loss_of, **options}
        with pytest.raises(ValueError, match=message):
            gpipe.step(x, **given)


def test_hooks_of_the_model_itself():
    for register in [
        'register_forward_hook',
        'register_forward_pre_hook',
        'register_full_backward_hook',
        'register_full_backward_pre_hook',
    ]:
        gpipe = GPipe(layers(), [4, 4], devices=['cpu'] * 2)
        handle = getattr(gpipe, register)(lambda *args: None)
        x = torch.randn(4, 4, dtype=torch.double)
        with pytest.raises(RuntimeError, match='register them on its layers'):
            gpipe.step(x, x[:, :3], loss_of)
        handle.remove()
        gpipe.step(x, x[:, :3], loss_of)


def test_a_way_out_of_devices_in_another_order():
    gpipe = GPipe(layers(), [2, 2, 2, 2], devices=['cpu:0', 'cpu:1'] * 2, chunks=3)
    x = torch.randn(6, 4, dtype=torch.double)
    with pytest.raises(ValueError, match=r'devices=\[0, 1, 1, 0\]'):
        gpipe.step(x, x[:, :3], loss_of, schedule='zb-v')


def test_nothing_to_train():
    gpipe = GPipe(layers().requires_grad_(False), [4, 4], devices=['cpu'] * 2)
    x = torch.randn(4, 4, dtype=torch.double)
    with pytest.raises(RuntimeError, match='there is nothing to train'):
        gpipe.step(x, x[:, :3], loss_of)


def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / 'schedule.CSV'
    path.write_text(make('1f1b', 2, 3).to_csv())
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=['cpu:0', 'cpu:1'], chunks=3)
    train(model, gpipe, 7, schedule=path)
    train(model, gpipe, 7, schedule=str(path))
    path.write_text('0F0,zero\n')
    with pytest.raises(ValueError, match='row 1, column 2'):
        gpipe.step(torch.zeros(3, 4).double(), torch.zeros(3, 3).double(), loss_of, schedule=path)


def test_a_schedule_from_a_file_with_a_mark_of_its_encoding(tmp_path):
    """In v0.8.0, the mark was taken for a part of the first action."""
    path = tmp_path / 'schedule.csv'
    path.write_text(make('1f1b', 2, 3).to_csv(), 'utf-8-sig')
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=['cpu:0', 'cpu:1'], chunks=3)
    train(model, gpipe, 7, schedule=path)
