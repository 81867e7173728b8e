"""Checkpoints: saved states are loaded in groups of any size, and in one process."""

import os
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import torchgpipe.shard as ts
from tests.marks import slow
from tests.shard.plain import give_gradients, pair, whole
from tests.shard.processes import outcomes, run
from tests.shard.test_state_dict import Net, optimizers, regroup, same, same_states, stepped


def loaded(folder, sizes):
    """Save a model with each optimizer, load it in groups of other sizes, and collect it there."""
    (plain, plain_optimizers), (sharded, sharded_optimizers) = stepped()
    for i, optimizer in enumerate(sharded_optimizers):
        ts.save_checkpoint(f'{folder}/{i}', sharded, optimizer)
    for size in sizes:
        regroup(size)
        torch.manual_seed(size)
        other = Net(ts.nn.ParallelLinear, ts.nn.ParallelEmbedding).double()
        give_gradients(pair(Net)[0], other)  # These are not to be taken for a step.
        for i, optimizer in enumerate(optimizers(other.parameters())):
            optimizer.param_groups[0]['lr'] = 7.0
            ts.load_checkpoint(f'{folder}/{i}', other, optimizer)
            same(whole(other), plain.state_dict())
            found = ts.collect_optimizer_state_dict(optimizer, optimizer.state_dict())
            same_states(found, plain_optimizers[i].state_dict())
    return plain.state_dict(), [optimizer.state_dict() for optimizer in plain_optimizers]


@pytest.mark.parametrize('world, group, sizes', [(2, 2, [2, 1]), (4, 2, [4]), slow(4, 4, [2])])
def test_a_checkpoint_is_loaded_in_groups_of_another_size(world, group, sizes, tmp_path):
    run(world, loaded, str(tmp_path), sizes, group=group)


def test_a_checkpoint_is_loaded_in_one_process_by_pytorch_alone(tmp_path):
    values, states = run(2, loaded, str(tmp_path), [], group=2)[0]
    plain = Net(
        lambda *args, dim, **options: nn.Linear(*args, **options),
        lambda *args, dim, **options: nn.Embedding(*args, **options),
    ).double()
    optimizer = optimizers(plain.parameters())[0]
    model_state, optimizer_state = get_state_dict(plain, optimizer)
    read = {'model': model_state, 'optimizer': optimizer_state}
    dcp.load(read, checkpoint_id=f'{tmp_path}/0')
    set_state_dict(
        plain, optimizer, model_state_dict=read['model'], optim_state_dict=read['optimizer']
    )
    same(plain.state_dict(), values)
    same_states(optimizer.state_dict(), states[0])


def wrapped(folder):
    """Save a model in DDP before the first step, load it without DDP, and check refusals."""
    _, sharded = pair(Net)
    optimizer = optimizers(sharded.parameters())[0]
    ts.register_ddp_parameters_to_ignore(sharded)
    ddp = DistributedDataParallel(sharded)
    before = {key: value.clone() for key, value in sharded.state_dict().items()}
    ts.save_checkpoint(folder, ddp, optimizer)
    assert not optimizer.state
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    ts.load_checkpoint('', sharded, optimizer, storage_reader=dcp.FileSystemReader(folder))
    same(sharded.state_dict(), before)
    assert not optimizer.state
    in_place = f'{folder}/in place'  # As all were, before there were sums of files.
    ts.save_checkpoint('', sharded, optimizer, storage_writer=dcp.FileSystemWriter(in_place))
    ts.load_checkpoint(in_place, sharded, optimizer)
    same(sharded.state_dict(), before)
    with pytest.raises((RuntimeError, FileExistsError), match='in place in it'):
        ts.save_checkpoint(folder, sharded)
    other = optimizers(sharded.parameters())[1]
    with pytest.raises(
        ValueError,
        match=r"only this one has \['0.dampening', .* only the "
        r"checkpoint \['0.amsgrad', ",
    ):
        ts.load_checkpoint(folder, sharded, other)
    short = torch.optim.AdamW([sharded.row.weight], amsgrad=True)
    with pytest.raises(
        ValueError,
        match=r"this one has \[\['row.weight'\]\], the checkpoint "
        r"\[\['words.weight', ",
    ):
        ts.load_checkpoint(folder, sharded, short)
    sharded.norm, sharded.another = nn.Identity(), nn.Linear(2, 2)
    with pytest.raises(
        ValueError,
        match="misses 'model.another.bias', 'model.another.weight'; "
        "the model does not have 'model.norm.bias', ",
    ):
        ts.load_checkpoint(folder, sharded)


def test_a_checkpoint_has_the_names_of_the_plain_model_and_is_refused_by_another(tmp_path):
    run(4, wrapped, str(tmp_path), group=2)


def fails(folder):
    """Save a state that one rank cannot save, and read one that is missing on one rank."""
    _, sharded = pair(Net)
    optimizer = optimizers(sharded.parameters())[0]
    if dist.get_rank() == 1:
        optimizer.state[sharded.row.weight]['odd'] = torch.ones(2)
    with pytest.raises(ValueError, match="'odd'"):
        ts.save_checkpoint(folder, sharded, optimizer)
    ts.save_checkpoint(folder, sharded)
    if dist.get_rank() == 1:
        folder += '/nowhere'
    ts.load_checkpoint(folder, sharded)


def replaced(folder):
    """Save twice, of which the second fails on one rank while it writes; load the first."""
    model = nn.Sequential(ts.nn.ParallelLinear(6, 8, dim=1))
    ts.save_checkpoint(folder, model)
    ts.save_checkpoint(folder, model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(dcp.FileSystemWriter, 'write_data', None)
        text, _ = raised(ts.save_checkpoint, folder, model)
    assert 'saving a checkpoint failed on rank' in text and 'not callable' in text
    ts.load_checkpoint(folder, model)
    same(model.state_dict(), before)


def test_a_checkpoint_takes_the_place_of_another_when_it_is_complete(tmp_path):
    run(2, replaced, str(tmp_path / 'model'), group=2)
    assert sorted(os.listdir(tmp_path)) == ['model', 'model.saving']
    assert sorted(os.listdir(tmp_path / 'model')) == ['.metadata', '__0_0.distcp', '__1_0.distcp']


def raised(function, *args):
    """Return the exception that a call raises, and the type of its cause."""
    with pytest.raises(Exception) as found:
        function(*args)
    return f'{found.type.__name__}: {found.value}', type(found.value.__cause__).__name__


def fails_everywhere(folder):
    """Load other shapes, save in a place that one rank can't write, and a weight that was cut."""
    model, other = (nn.Sequential(ts.nn.ParallelLinear(6, size, dim=1)) for size in (8, 9))
    ts.save_checkpoint(folder, model)
    rank = dist.get_rank()
    here = f'{folder}/.metadata/here' if rank else f'{folder}/there'  # not within a file
    found = [raised(ts.load_checkpoint, folder, other), raised(ts.save_checkpoint, here, model)]
    if rank:
        model[0].weight.data = model[0].weight.data[:1]
    return [
        *found,
        raised(ts.save_checkpoint, f'{folder}/cut', model),
        raised(lambda: ts.collect_state_dict(model, model.state_dict())),
    ]


def test_a_failure_is_an_exception_on_all_ranks(tmp_path):
    """PyTorch's CheckpointException is none."""
    for shapes, place, *cut in run(2, fails_everywhere, str(tmp_path), group=2):
        for (text, cause), who, reason in (
            (shapes, '0, 1', 'Size mismatch .*8, 6.*9, 6.* for model.0.weight'),
            (place, '1', 'NotADirectoryError: .*here'),
        ):
            assert re.match(
                rf'RuntimeError: \w+ a checkpoint failed on ranks \[{who}\]: .*'
                f'{reason}',
                text,
            )
            assert cause == 'CheckpointException'
        for text, _ in cut:
            assert text.startswith('ValueError: ')
            assert "'0.weight' is (1, 6) and not (4, 6)" in text


def test_a_rank_that_fails_to_save_or_load_is_named_by_the_others(tmp_path):
    one, another = outcomes(2, fails, str(tmp_path), group=2)
    assert 'failed on rank 1, so it ended here, too: FileNotFoundError' in one.text
    assert 'nowhere' in another.text
