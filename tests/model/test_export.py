"""Export: files of safetensors, their sizes, and folders that take their place at once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from torchgpipe import GPipe
from torchgpipe.model import export
from torchgpipe.model.export import (
    NewFolder,
    OpenFiles,
    TensorFile,
    TensorSpec,
    parse_size,
    plan_files,
)
from torchgpipe.sequential import to_sequential


def model(value=1.0):
    """Return a model with a tied weight, a buffer and several dtypes."""
    layers = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3).bfloat16()
    )
    layers[2].weight = layers[0].weight
    nn.init.constant_(layers[0].weight, value)
    return layers


def pipeline(module):
    return GPipe(module, [len(module)], devices=['cpu'])


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


def load_folder(folder):
    """Return all tensors of a folder, by the index if there is one."""
    index = folder / 'model.safetensors.index.json'
    if not index.exists():
        return load_file(folder / 'model.safetensors')
    files = json.loads(index.read_text())['weight_map']
    tensors = {}
    for file in {*files.values()}:
        tensors.update(load_file(folder / file))
    assert tensors.keys() == files.keys()
    return tensors


@pytest.mark.parametrize('size', ['50GB', 100, '0.1kB'])
def test_a_folder_has_each_tensor_once_and_loads_again(tmp_path, size):
    plain = model()
    gpipe = pipeline(plain)
    gpipe.save_pretrained(tmp_path / 'model', max_shard_size=size)
    expected = plain.state_dict()
    del expected['2.weight']
    tensors = load_folder(tmp_path / 'model')
    assert tensors.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(tensors[name], x) and tensors[name].dtype == x.dtype
    again = GPipe(model(0.0), [4], devices=['cpu'], weights=tmp_path / 'model')
    for name, x in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], x)
    assert files_of(tmp_path) == ['model']
    if size != '50GB':
        sizes = []
        for file in (tmp_path / 'model').glob('*.safetensors'):
            with safe_open(file, 'pt') as opened:
                sizes.append(sum(opened.get_tensor(name).nbytes for name in opened.keys()))
        assert len(sizes) > 1 and max(sizes) <= 100


def test_names_of_a_converted_model(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.body = nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.body(self.words(x)))

    net = Net()
    gpipe = pipeline(to_sequential(net, torch.zeros(2, 3, dtype=torch.long)))
    gpipe.save_pretrained(tmp_path)
    tensors = load_folder(tmp_path)
    assert {*tensors} == {'words.weight', 'body.weight', 'body.bias'}
    assert torch.equal(tensors['words.weight'], net.words.weight)
    assert [name for name, _ in gpipe.named_tensors()] == [*dict.fromkeys(gpipe_names(gpipe))]
    assert not [*gpipe.named_tensors(full=False)]


def gpipe_names(gpipe):
    """Return the names of tensors in the order of layers, without the second name of a tie."""
    names = [name.partition('.')[2] for name in gpipe.state_dict()]
    return [name for name in names if name != 'head.weight']


def test_strides_scalars_and_empty_tensors(tmp_path):
    tensors = {
        'transposed': torch.arange(6.0).view(2, 3).t(),
        'scalar': torch.tensor(3),
        'empty': torch.empty(0, 4),
        'flags': torch.tensor([True, False, True]),
        'half': torch.arange(3).half(),
        'double': torch.arange(3).double(),
        'complex': torch.tensor([1 + 2j]).to(torch.complex64),
    }
    specs = [TensorSpec(name, tuple(x.shape), x.dtype) for name, x in tensors.items()]
    file = TensorFile(tmp_path / 'x.safetensors', specs)
    for name, x in tensors.items():
        file.write(name, x)
    for name, x in load_file(tmp_path / 'x.safetensors').items():
        assert torch.equal(x, tensors[name]) and x.dtype == tensors[name].dtype


def test_states_and_dtypes_that_files_do_not_have(tmp_path):
    class Counter(nn.Linear):
        def get_extra_state(self):
            return 3

        def set_extra_state(self, state):
            pass

    with pytest.raises(ValueError, match="'0._extra_state' is a int, but files of safetensors"):
        pipeline(nn.Sequential(Counter(2, 2))).save_pretrained(tmp_path / 'a')
    double = nn.Sequential(nn.Linear(2, 2))
    double[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex128))
    with pytest.raises(ValueError, match="'0.weight' is torch.complex128, which safetensors"):
        pipeline(double).save_pretrained(tmp_path / 'a')
    assert not files_of(tmp_path)


@pytest.mark.parametrize('size', [0, -1, '5', 'GB', '0GB', None])
def test_sizes_of_files_that_are_none(size):
    with pytest.raises(ValueError, match='max_shard_size is a number of bytes'):
        plan_files([], size)


def test_sizes():
    assert [parse_size(size) for size in (7, '5GB', '1.5 MiB', '3kb', '12B')] == [
        7,
        5 * 10**9,
        3 << 19,
        3000,
        12,
    ]


def test_empty_tensors_and_their_files(tmp_path):
    empty = TensorSpec('empty', (0, 3), torch.float32)
    full = TensorSpec('full', (2,), torch.float32)
    for specs in ([[empty]], [[empty, full]], [[full], [empty]], [[], [empty], [full]]):
        files = plan_files(specs, 4)
        expected = [(owner, spec) for owner, part in enumerate(specs) for spec in part]
        assert [(file.owner, spec) for file in files for spec in file.specs] == expected
    layers = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2))
    layers[0].weight = nn.Parameter(torch.empty(2, 0))
    gpipe = pipeline(layers)
    gpipe.save_pretrained(tmp_path)
    assert load_folder(tmp_path)['0.weight'].shape == (2, 0)


def test_files_that_are_not_as_planned_raise(tmp_path):
    spec = TensorSpec('x', (2, 2), torch.float32)
    for wrong in (torch.ones(2, 3), torch.ones(2, 2).double()):
        file = TensorFile(tmp_path / 'x', [spec])
        with pytest.raises(RuntimeError, match="'x' was torch.float32 of shape"):
            file.write('x', wrong)
        file.abort()
    files = plan_files([[spec, TensorSpec('y', (1,), torch.int64)]], 100)
    opened = OpenFiles(files, tmp_path)
    with pytest.raises(RuntimeError, match='model.safetensors was planned, and not written'):
        opened.check()
    opened.write('x', torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="'y' was planned for a file, and not written"):
        opened.check()
    opened.write('y', torch.ones(1, dtype=torch.int64))
    opened.check()
    opened.close()


def test_a_save_that_was_interrupted_between_two_names(tmp_path):
    """Without an exchange of folders, the earlier one is put back."""
    folder = tmp_path / 'model'
    pipeline(model(1.0)).save_pretrained(folder)
    (folder / 'tokenizer.json').write_text('words')
    folder.rename(tmp_path / '.model.before')
    pipeline(model(2.0)).save_pretrained(folder)
    assert files_of(folder) == ['model.safetensors', 'tokenizer.json']
    assert load_folder(folder)['0.weight'].eq(2).all()
    assert files_of(tmp_path) == ['model']


def test_owners_have_their_own_files():
    specs = [[TensorSpec(f'{owner}.{k}', (3,), torch.int8) for k in range(3)] for owner in (0, 1)]
    files = plan_files(specs, 6)
    assert [(file.owner, [spec.name for spec in file.specs]) for file in files] == [
        (0, ['0.0', '0.1']),
        (0, ['0.2']),
        (1, ['1.0', '1.1']),
        (1, ['1.2']),
    ]
    assert files[2].name == 'model-00003-of-00004.safetensors'
    assert [len(file.specs) for file in plan_files(specs, 1)] == [1] * 6


# Folders.


def test_other_files_of_a_folder_stay(tmp_path):
    folder = tmp_path / 'model'
    pipeline(model(1.0)).save_pretrained(folder, max_shard_size=100)
    (folder / 'tokenizer.json').write_text('words')
    pipeline(model(2.0)).save_pretrained(folder)
    assert files_of(folder) == ['model.safetensors', 'tokenizer.json']
    assert (folder / 'tokenizer.json').read_text() == 'words'
    assert load_folder(folder)['0.weight'].eq(2).all()
    assert files_of(tmp_path) == ['model']


def test_without_links_and_exchanges_of_folders(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(os, 'link', refuse)
    monkeypatch.setattr(export.ctypes, 'CDLL', lambda *_, **__: None)
    folder = tmp_path / 'model'
    pipeline(model(1.0)).save_pretrained(folder)
    (folder / 'tokenizer.json').write_text('words')
    pipeline(model(2.0)).save_pretrained(folder)
    assert files_of(folder) == ['model.safetensors', 'tokenizer.json']
    assert load_folder(folder)['0.weight'].eq(2).all()
    assert files_of(tmp_path) == ['model']


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(FileExistsError, match='is a file: name a folder'):
        pipeline(model()).save_pretrained(tmp_path / 'file')
    (tmp_path / 'model' / 'checkpoint-5').mkdir(parents=True)
    with pytest.raises(FileExistsError, match='which has the folder checkpoint-5 in it'):
        pipeline(model()).save_pretrained(tmp_path / 'model')
    assert files_of(tmp_path) == ['file', 'model']


def test_the_working_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match='which is the working directory of this process'):
        pipeline(model()).save_pretrained('.')


def test_two_tensors_of_one_name_are_refused():
    specs = [TensorSpec('x', (2,), torch.float32), TensorSpec('x', (3,), torch.float32)]
    with pytest.raises(ValueError, match="two layers have a tensor 'x' that is not shared"):
        plan_files([specs[:1], specs[1:]], 100)


def test_an_interrupted_save_is_cleared_by_the_next_one(tmp_path):
    (tmp_path / '.model.saving').mkdir()
    (tmp_path / '.model.saving' / 'model.safetensors').write_bytes(b'half')
    pipeline(model()).save_pretrained(tmp_path / 'model')
    assert files_of(tmp_path) == ['model'] and load_folder(tmp_path / 'model')


def test_a_failed_save_leaves_the_earlier_folder(tmp_path, monkeypatch):
    folder = tmp_path / 'model'
    pipeline(model(1.0)).save_pretrained(folder)

    def full(self, name, tensor):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(TensorFile, 'write', full)
    with pytest.raises(OSError, match='No space left'):
        pipeline(model(2.0)).save_pretrained(folder)
    assert files_of(tmp_path) == ['model'] and load_folder(folder)['0.weight'].eq(1).all()


KILLED = """
import os
import sys

import torch
from torch import nn

from torchgpipe import GPipe

print(os.getpid(), flush=True)
value = 1
while True:
    value += 1
    layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])
    for layer in layers:
        nn.init.constant_(layer.weight, value)
    GPipe(layers, [8], devices=['cpu']).save_pretrained(sys.argv[1], max_shard_size='1MB')
    print(value, flush=True)
"""


@pytest.mark.slow
def test_a_killed_save_leaves_one_of_the_folders(tmp_path):
    """At ten random moments."""
    torch.manual_seed(0)
    for moment in torch.rand(10).tolist():
        process = subprocess.Popen(
            [sys.executable, '-c', KILLED, str(tmp_path / 'model')],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, 'PYTHONPATH': str(Path(__file__).parents[2])},
        )
        values = [process.stdout.readline() for _ in range(3)]
        # After some bytes of the next save.
        try:
            process.wait(moment / 20)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
        values += process.stdout.read().split()
        process.stdout.close()
        tensors = load_folder(tmp_path / 'model')
        saved = {float(x.flatten()[0]) for name, x in tensors.items() if 'weight' in name}
        assert len(tensors) == 16 and len(saved) == 1
        assert saved.pop() - float(values[-1]) in (0, 1)


def test_a_new_folder_in_a_folder_that_does_not_exist(tmp_path):
    new = NewFolder(tmp_path / 'a' / 'b')
    new.begin()
    new.end()
    assert (tmp_path / 'a' / 'b').is_dir()
