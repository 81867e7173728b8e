"""Files of a checkpoint: all ranks' or none, whole or refused, whatever happens in between."""

import os
import random
import re
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from tests.distributed.failing import endings
from tests.distributed.models import perceptron
from tests.distributed.saving import World, adam, fresh, made, same, steps, values
from tests.shard.processes import outcomes, run
from torchgpipe.distributed import load_checkpoint, save_checkpoint
from torchgpipe.shard.folders import Writer, opened

# --- without waiting
# ------------------------------------------------------------------------------------------------


def not_waited_for(release, folder, slow):
    """Save twice; end without waiting for the second time, with one rank that is slow."""
    world = World('pipe')
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    world.save(folder, optimizer)
    steps(world, optimizer, range(1, 2))
    write_data = FileSystemWriter.write_data

    def slowly(*args):
        time.sleep(0.3)
        return write_data(*args)

    if dist.get_rank() == slow:
        FileSystemWriter.write_data = slowly
    world.save(folder, optimizer, wait=False)
    dist.destroy_process_group()


@pytest.mark.parametrize('slow', [0, 1])
def test_groups_may_end_before_a_save_does(slow, tmp_path):
    assert endings(2, not_waited_for, str(tmp_path / 'model'), slow) == [(0, ''), (0, '')]
    assert os.listdir(tmp_path) == ['model']
    assert not [*(tmp_path / 'model').glob('.metadata.*')]
    check_trained(tmp_path / 'model', range(2))


def check_trained(folder, numbers):
    """See that a checkpoint is of a model that has taken some steps."""
    world, expected = World('plain'), World('plain')
    optimizer, own = adam(world.model), adam(expected.model)
    found = load_checkpoint(folder, world.model, optimizer)
    steps(expected, own, numbers(found) if callable(numbers) else numbers)
    for name, x in expected.model.state_dict().items():
        torch.testing.assert_close(world.model.state_dict()[name], x)
    for x, other in zip(world.model.parameters(), expected.model.parameters()):
        torch.testing.assert_close(optimizer.state[x]['exp_avg'], own.state[other]['exp_avg'])
    return found, world, optimizer


def go_on(world, folder, task):
    """Take a step, save or load."""
    {
        'step': lambda: steps(world, adam(world.model), range(1)),
        'save': lambda: world.save(folder),
        'load': lambda: world.load(folder),
    }[task]()


def gone(folder, task):
    """Save without waiting while rank 1 ends, and return the values of the checkpoint before."""
    world = World('pipe')
    world.save(folder)
    begun = threading.Event()

    def hangs(*args):
        begun.set()
        threading.Event().wait()

    if dist.get_rank() == 1:
        FileSystemWriter.write_data = hangs
    saving = world.save(folder, wait=False)
    if dist.get_rank() == 1:
        begun.wait()
        os._exit(0)
    before = values(world.model)
    with pytest.raises(RuntimeError, match='rank 1'):
        go_on(world, folder, task)
    with pytest.raises(RuntimeError, match=r'ranks \[1\]: nothing was heard of it'):
        saving.result()
    return before


@pytest.mark.slow
@pytest.mark.parametrize('task', ['step', 'load'])
def test_a_rank_that_ends_while_it_writes_is_not_waited_for(task, tmp_path):
    """Others have a timeout of half an hour, and end by the error of what they do next."""
    (expected, _) = outcomes(2, gone, str(tmp_path / 'model'), task)
    other = fresh()
    load_checkpoint(tmp_path / 'model', other)
    same(values(other), expected)


def gone_at_the_end(folder, wait):
    """Save while rank 0 ends when it replaces the folder, and save again if it has not waited."""
    world = World('pipe')
    world.save(folder)
    Writer._replace = lambda *args: os._exit(0)
    with pytest.raises(RuntimeError, match='rank 0'):
        world.save(folder, wait=wait)
        world.save(folder)
    return values(world.model)


@pytest.mark.slow
@pytest.mark.parametrize('wait', [True, False])
def test_rank_0_that_ends_while_it_replaces_the_folder_is_not_waited_for(wait, tmp_path):
    (_, expected) = outcomes(2, gone_at_the_end, str(tmp_path / 'model'), wait)
    assert isinstance(expected, dict), expected
    assert sorted(os.listdir(tmp_path)) == ['model', 'model.saving']


def seen_late(folder):
    """Save where the file system shows the new folder to rank 1 later than to rank 0."""
    world, seen = World('pipe'), []
    late = iter([{'writing': [], 'written': [0, 1], 'failed': []}] * 3 + [None])
    if dist.get_rank() == 1:
        Writer._states = lambda self: seen.append(next(late)) or seen[-1]
    world.save(folder)
    return len(seen)


def test_a_save_ends_when_its_rank_sees_the_new_folder(tmp_path):
    assert outcomes(2, seen_late, str(tmp_path / 'model')) == [0, 4]


# --- killed
# ------------------------------------------------------------------------------------------------


def killed(folder, at, rank, wait):
    """Save again and again, until one rank is killed."""
    world = World('replicate')
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    world.save(folder, optimizer, extra={'step': 0})
    if dist.get_rank() == rank:
        threading.Timer(at, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(1, 1000):
        steps(world, optimizer, range(1, 2))
        world.save(folder, optimizer, extra={'step': number}, wait=wait)


def check_killed(folder, at, rank, wait):
    """Kill a rank at some moment, and load the checkpoint that is there."""
    shutil.rmtree(folder, ignore_errors=True)
    outcomes(4, killed, str(folder / 'model'), at, rank, wait)
    found, world, optimizer = check_trained(
        folder / 'model', lambda found: [0] + [1] * found['step']
    )
    save_checkpoint(folder / 'model', world.model, optimizer)
    assert os.listdir(folder) == ['model']
    return found['step']


@pytest.mark.slow
def test_a_rank_that_is_killed_at_some_moment_leaves_a_whole_checkpoint(tmp_path):
    generator = random.Random(0)
    check_killed(tmp_path / 'models', generator.uniform(0.1, 0.6), generator.randrange(4), False)


# --- damaged
# ------------------------------------------------------------------------------------------------


def flipped(data, k):
    return data[:k] + bytes([data[k] ^ 1]) + data[k + 1 :]


DAMAGES = {
    'first byte': lambda data: flipped(data, 0),
    'some byte': lambda data: flipped(data, len(data) // 3),
    'last byte': lambda data: flipped(data, len(data) - 1),
    'cut': lambda data: data[:-1],
    'half': lambda data: data[: len(data) // 2],
    'without its sum': lambda data: data[:-15],
    'longer': lambda data: data + b'?',
    'empty': lambda data: b'',
    'missing': None,
}


def damaged(folder):
    """Load damaged checkpoints on two ranks. Nothing may have changed."""
    world = World('pipe')
    optimizer = adam(world.model)
    steps(world, optimizer, range(1))
    before, found = values(world.model), {}
    for name in sorted(os.listdir(folder)):
        with pytest.raises(Exception) as error:
            world.load(f'{folder}/{name}', optimizer)
        same(values(world.model), before)
        found[name] = str(error.value)
    return found


def test_a_damaged_file_is_named_before_anything_changes(tmp_path):
    run(2, made, 'pipe', str(tmp_path / 'model'))
    names = sorted(os.listdir(tmp_path / 'model'))
    assert names == ['.metadata', '__0_0.distcp', '__1_0.distcp']
    for name in names:
        for how, damage in DAMAGES.items():
            copy = tmp_path / 'damaged' / f'{name} {how}'
            shutil.copytree(tmp_path / 'model', copy)
            data = (copy / name).read_bytes()
            (copy / name).unlink()
            if damage is not None:
                (copy / name).write_bytes(damage(data))
    for found in run(2, damaged, str(tmp_path / 'damaged')):
        for copy, text in found.items():
            name, _, how = copy.partition(' ')
            assert name in text.replace(copy, ''), (copy, text)
    model = fresh()
    before = values(model)
    for copy in (tmp_path / 'damaged').iterdir():
        with pytest.raises((ValueError, FileNotFoundError)):
            load_checkpoint(copy, model)
        same(values(model), before)


def test_checkpoints_are_read_by_pytorch_and_the_reverse(tmp_path):
    model = perceptron()
    save_checkpoint(tmp_path / 'ours', model)
    state = {'model': perceptron().state_dict()}
    state_dict_loader.load(state, storage_reader=FileSystemReader(tmp_path / 'ours'))
    same(state['model'], model.state_dict())
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / 'theirs')
    other = perceptron()
    load_checkpoint(tmp_path / 'theirs', other)
    same(values(other), values(model))
    assert not hasattr(opened(tmp_path / 'theirs')[1], 'files')
    file = tmp_path / 'theirs/__0_0.distcp'
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=re.escape(f'{file} has {file.stat().st_size} bytes')):
        load_checkpoint(tmp_path / 'theirs', other)


def test_one_file_of_options_is_read_before_tensors(tmp_path):
    """Parameters of one group had different options: nothing changes."""
    model = fresh()
    optimizer = torch.optim.SGD(
        [{'params': [x], 'lr': k} for k, x in enumerate(model.parameters())]
    )
    save_checkpoint(tmp_path / 'model', model, optimizer)
    other = perceptron()
    before = values(other)
    with pytest.raises(ValueError, match='in one group'):
        load_checkpoint(tmp_path / 'model', other, torch.optim.SGD(other.parameters()))
    same(values(other), before)
