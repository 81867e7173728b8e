"""Saving and loading: interrupted, in the background, into the wrong place, of another model."""

import os
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.distributed.models import perceptron
from tests.distributed.saving import World, adam, fresh, made, same, steps, values
from tests.shard.processes import Failure, outcomes, run
from torchgpipe.distributed import load_checkpoint, save_checkpoint
from torchgpipe.distributed.checkpoint import check_model, check_optimizer

# --- interrupted
# -----------------------------------------------------------------------------------------


def interrupted(folder, event):
    """Save, take a step, and save again, which fails on one rank while it writes."""
    world = World('pipe')
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    world.save(folder, optimizer)
    before = values(world.model)
    steps(world, optimizer, range(1, 2))
    write_data = FileSystemWriter.write_data

    def fails(writer, plan, planner):
        write_data(writer, plan, planner)
        if event == 'kill':
            os._exit(1)
        raise OSError('no space left')

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = fails
    for options in ({}, {'wait': False}):
        with pytest.raises(RuntimeError, match=r'failed on ranks \[1\]: OSError: no space left'):
            saving = world.save(folder, optimizer, **options)
            saving.result()
    FileSystemWriter.write_data = write_data
    world.load(folder, optimizer)
    same(before, values(world.model))
    world.save(folder, optimizer)
    return before


@pytest.mark.slow
def test_a_save_that_fails_leaves_the_last_one(tmp_path):
    ranks = run(2, interrupted, str(tmp_path / 'model'), 'raise')
    other = fresh()
    load_checkpoint(tmp_path / 'model', other)
    for before in ranks:
        same(values(other), before)
    assert os.listdir(tmp_path) == ['model']


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_last_one(tmp_path):
    assert all(
        isinstance(each, Failure)
        for each in outcomes(2, interrupted, str(tmp_path / 'model'), 'kill')
    )
    model = fresh()
    world, optimizer = World('plain'), None
    load_checkpoint(tmp_path / 'model', model)
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    for name, x in world.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], x)
    save_checkpoint(tmp_path / 'model', model)
    assert os.listdir(tmp_path) == ['model']


def test_between_two_names(tmp_path):
    """After either of both renamings, the remaining folder is loaded, and saved over."""
    made('plain', tmp_path / 'model')
    expected = fresh()
    load_checkpoint(tmp_path / 'model', expected)
    (tmp_path / 'model/.metadata.replaced').touch()
    (tmp_path / 'model').rename(tmp_path / 'model.before')
    shutil.copytree(tmp_path / 'model.before', tmp_path / 'model.saving')
    (tmp_path / 'model.saving/.metadata.replaced').rename(
        tmp_path / 'model.saving/.metadata.0.written'
    )
    model = fresh()
    load_checkpoint(tmp_path / 'model', model)
    same(values(model), values(expected))
    save_checkpoint(tmp_path / 'model', fresh())
    assert os.listdir(tmp_path) == ['model']
    shutil.copytree(tmp_path / 'model', tmp_path / 'model.before')
    (tmp_path / 'model.before/.metadata.replaced').touch()
    save_checkpoint(tmp_path / 'model', model)
    assert os.listdir(tmp_path) == ['model']
    load_checkpoint(tmp_path / 'model', model)
    same(values(model), values(expected))


def test_a_save_that_ends_between_two_names(tmp_path, monkeypatch):
    """The checkpoint that it was replacing is loaded, and saved over."""
    expected = nn.Linear(2, 2)
    save_checkpoint(tmp_path / 'model', expected)
    rename = Path.rename

    def interrupted(path, target):
        if path.name == 'model.saving':
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, 'rename', interrupted)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path / 'model', nn.Linear(2, 2))
    assert sorted(os.listdir(tmp_path)) == ['model.before', 'model.saving']
    model = nn.Linear(2, 2)
    load_checkpoint(tmp_path / 'model', model)
    assert torch.equal(model.weight, expected.weight)
    save_checkpoint(tmp_path / 'model', model)
    assert os.listdir(tmp_path) == ['model']


def test_a_checkpoint_with_the_name_of_a_save_is_kept(tmp_path):
    """It is neither deleted nor loaded in place of another one."""
    for name in ('model.before', 'model.saving'):
        path = tmp_path / name
        made('plain', path)
        with pytest.raises(FileNotFoundError, match='is not there'):
            load_checkpoint(tmp_path / 'model', fresh())
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        for _ in range(2):
            with pytest.raises(FileExistsError, match=f'{name}, but there is something else: mov'):
                save_checkpoint(tmp_path / 'model', fresh())
        assert files == {file.name: file.read_bytes() for file in path.iterdir()}
        shutil.rmtree(path)


@pytest.mark.parametrize(
    'name, mark', [('model.before', '.metadata.replaced'), ('model.saving', '.metadata.0.written')]
)
def test_an_interrupted_deletion_is_ended_by_the_next_save(tmp_path, monkeypatch, name, mark):
    made('plain', tmp_path / 'model')
    shutil.copytree(tmp_path / 'model', tmp_path / name)
    (tmp_path / name / mark).touch()
    unlink, calls = Path.unlink, []

    def interrupted(path, *args):
        calls.append(path)
        if len(calls) > 1:
            raise KeyboardInterrupt
        unlink(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, 'unlink', interrupted)
        with pytest.raises(BaseException):
            save_checkpoint(tmp_path / 'model', fresh())
    assert (tmp_path / name / mark).exists() and len(calls) > 1
    assert all(path.name != mark for path in calls)
    save_checkpoint(tmp_path / 'model', fresh())
    assert os.listdir(tmp_path) == ['model']


# --- in the background
# -----------------------------------------------------------------------------------


def behind(folder, layout):
    """Train on while a checkpoint is written, and load it."""
    world = World(layout)
    optimizer = adam(world.model)
    losses = steps(world, optimizer, range(2))
    saving = world.save(folder, optimizer, wait=False)
    before = values(world.model)
    went_on = steps(world, optimizer, range(2, 4))
    saving.result()
    assert saving.done()
    world.save(folder + '2', optimizer, wait=False)
    world.save(folder + '2', wait=False)  # It waits for the one before.
    world.load(folder, optimizer)
    same(before, values(world.model))
    assert steps(world, optimizer, range(2, 4)) == pytest.approx(went_on, rel=1e-12)
    return losses


@pytest.mark.slow
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    run(4, behind, str(tmp_path / 'model'), 'shard')
    assert sorted(os.listdir(tmp_path)) == ['model', 'model2']


def unnoticed(folder, task):
    """Save in the background, which fails on one rank; return the error of the next call."""
    world, write_data = World('pipe'), FileSystemWriter.write_data
    world.save(folder)

    def fails(writer, plan, planner):
        raise OSError('no space left')

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = fails
    world.save(folder, wait=False)
    error = refused(getattr(world, task), folder)
    FileSystemWriter.write_data = write_data
    world.load(folder)  # The error is raised once.
    return error


@pytest.mark.parametrize('task', ['save', 'load'])
def test_an_error_in_the_background_is_raised_by_the_next_save_or_load(task, tmp_path):
    for error in run(2, unnoticed, str(tmp_path / 'model'), task):
        assert 'failed on ranks [1]: OSError: no space left' in error


def staged(folder):
    """Return how often a rank copies the saved state, and the error if one cannot copy."""
    world, stage, calls = World('pipe'), FileSystemWriter.stage, []

    def count(writer, state):
        calls.append(state)
        return stage(writer, state)

    def fails(writer, state):
        raise MemoryError('no room')

    FileSystemWriter.stage = count
    world.save(folder, wait=False).result()
    if dist.get_rank() == 1:
        FileSystemWriter.stage = fails
    return len(calls), refused(lambda: world.save(folder, wait=False))


def test_all_ranks_raise_if_one_fails_to_copy_its_checkpoint(tmp_path):
    (once, first), (_, second) = run(2, staged, str(tmp_path / 'model'))
    assert once == 1 and second.startswith('MemoryError')
    assert 'as rank 1' in first and 'MemoryError: no room' in first


# --- refusals
# -------------------------------------------------------------------------------------


def refused(function, *args):
    """Return the error that a call raises."""
    with pytest.raises(Exception) as found:
        function(*args)
    return f'{found.type.__name__}: {found.value}'


def refused_folders(folder):
    world = World('pipe')
    own = f'{folder}/{dist.get_rank()}'
    found = [refused(world.load, f'{folder}/{name}') for name in ('nowhere', 'empty', 'broken')]
    return [
        *found,
        refused(world.save, f'{folder}/notes'),
        refused(world.save, own),
        refused(world.load, own),
        refused(world.save, f'{own}.own/model'),
    ]


def test_folders_that_are_no_checkpoints(tmp_path):
    for name in ('empty', 'broken', 'notes'):
        (tmp_path / name).mkdir()
    (tmp_path / 'broken/.metadata').write_text('?')
    (tmp_path / 'notes/notes.txt').write_text('?')
    made('plain', tmp_path / '1')
    shutil.copytree(tmp_path / '1', tmp_path / '0.saving')
    first, second = run(2, refused_folders, str(tmp_path))
    for nowhere, empty, broken, notes, other, missing, apart in (first, second):
        assert re.match(
            r'FileNotFoundError: .*/nowhere is no checkpoint: it is not there; there '
            r'are some at .*/1',
            nowhere,
        )
        assert '.saving' not in nowhere
        assert re.match(
            r'RuntimeError: saving a checkpoint failed on ranks \[0\]: RuntimeError: '
            r'rank 1 writes to another .*/0.own/model.saving',
            apart,
        )
        assert 'empty is no checkpoint: it has no .metadata, which is written last' in empty
        assert re.match(r'ValueError: .*/broken/.metadata cannot be read', broken)
        assert 'other settings on rank 1' in other
    assert 'takes the place of the whole folder' in first[3] and 'notes.txt in it' in first[3]
    assert 'as rank 0' in second[3] and 'notes.txt in it' in second[3]
    assert first[5].startswith('FileNotFoundError') and 'on rank 0' in second[5]
    assert os.listdir(tmp_path / 'notes') == ['notes.txt'] and not (tmp_path / '0').exists()


def refused_models(folder):
    world = World('pipe')
    optimizer = torch.optim.SGD(world.model.parameters(), lr=1.0, momentum=0.9)
    several = torch.optim.AdamW(
        [x for name, x in world.model.named_parameters() if name != '0.up.bias']
    )
    found = [refused(world.load, f'{folder}/{name}') for name in ('names', 'sizes')]
    lost = f'{folder}/lost'
    apart = refused(world.load, f'{folder}/{["plain", "values"][dist.get_rank()]}')
    assert 'loading a checkpoint has other settings on rank 1' in apart
    return [
        *found,
        *(
            refused(world.load, f'{folder}/{name}', each)
            for name, each in (('plain', optimizer), ('plain', several), ('values', optimizer))
        ),
        refused(world.load, lost),
        refused(world.save, lost, adam(nn.Linear(2, 3))),
    ]


def test_other_models(tmp_path):
    """Each rank raises the same, whatever part it has."""
    made('plain', tmp_path / 'plain')
    other = perceptron()
    other[7].upp = other[7].up
    del other[7].up
    save_checkpoint(tmp_path / 'names', other)
    other = perceptron()
    other[1].up = nn.Linear(6, 5, dtype=torch.float64)
    save_checkpoint(tmp_path / 'sizes', other)
    save_checkpoint(tmp_path / 'values', perceptron())
    save_checkpoint(tmp_path / 'lost', perceptron())
    next((tmp_path / 'lost').glob('*.distcp')).unlink()
    for found in run(2, refused_models, str(tmp_path)):
        expected = [
            r"ValueError: the checkpoint is of another model: it misses '7.up.weight' \(like "
            r"'7.upp.weight'\), .* the model does not have '7.upp.weight'",
            r"ValueError: .* of other sizes: in it '1.up.weight' is \(5, 6\), and not \(12, 6\)",
            r"ValueError: .* of another type: it has .*'betas'.*, but this one .*'momentum'",
            r"ValueError: .* of other parameters: the optimizer does not have '0.up.bias'",
            'ValueError: the checkpoint was saved without an optimizer',
            r'(ValueError: .*the checkpoint is damaged: .*/lost/__0_0.distcp is missing|'
            r'RuntimeError: loading, .* as rank . .*__0_0.distcp is missing)',
            r'ValueError: 2 parameters of the optimizer are not in the model, with shapes',
        ]
        assert len(found) == len(expected)
        for text, pattern in zip(found, expected):
            assert re.match(pattern, text), text


def test_a_link_stays_one(tmp_path):
    (tmp_path / 'real').mkdir()
    (tmp_path / 'link').symlink_to('real')
    with warnings.catch_warnings():
        warnings.simplefilter('error')  # PyTorch warns of one process.
        save_checkpoint(tmp_path / 'link', perceptron())
        save_checkpoint(tmp_path / 'link', perceptron())
        load_checkpoint(tmp_path / 'real', perceptron())
    assert sorted(os.listdir(tmp_path)) == ['link', 'real'] and (tmp_path / 'link').is_symlink()


def test_errors_name_some_names_and_the_options_that_matter():
    """Few of many names; and nothing of options that schedulers add, or another release has."""
    with pytest.raises(ValueError, match="does not have '0', '1', '2', '3', '4' and 3 more"):
        check_model({}, {str(k): () for k in range(8)})
    check_optimizer(['x'], {'lr', 'initial_lr'}, {'x': {'lr', 'new'}})
    check_optimizer(['x'], {'lr', 'new'}, {'x': {'lr', 'initial_lr'}})
    with pytest.raises(ValueError, match=r"it has \['old'\], but this one \['new'\]"):
        check_optimizer(['x'], {'lr', 'new'}, {'x': {'lr', 'old'}})
