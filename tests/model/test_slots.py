"""Slots of modules: new tensors for parameters and buffers, also for shared ones."""

from functools import partial

import torch
from torch import nn

from torchgpipe.model.slots import allocate, like, put, slots_in


def test_shared_tensors_get_one_new_tensor():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[0].weight.tag = 'kept'
    first_slots = {}
    for slot in [*slots_in(model)]:
        put(slot, partial(torch.add, slot.tensor.detach(), 1), first_slots)
    assert model[0].weight is model[1].weight and model[0].weight.tag == 'kept'
    assert isinstance(model[0].weight, nn.Parameter)
    assert model[2].running_mean.eq(1).all() and model[2].num_batches_tracked == 1


def test_slots_without_inner_modules():
    model = nn.Sequential(nn.Linear(2, 2))
    assert not [*slots_in(model, recurse=False)] and len([*slots_in(model)]) == 2


def test_memory_for_tensors_on_the_meta_device():
    with torch.device('meta'):
        conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        norm = nn.BatchNorm1d(3)
    weight = allocate(conv.weight, torch.device('cpu'))
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.requires_grad
    assert like(conv.weight, weight).requires_grad
    assert not allocate(norm.running_var, torch.device('cpu')).any()
