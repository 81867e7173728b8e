"""Tokens of a dataset: in order, epoch after epoch, from any position, on all ranks."""

import copy
import json

import pytest
import torch.distributed as dist
from tqdm import tqdm

from tests.trainer import killing
from tests.trainer.tiny import TINY, assert_same, launched, lines_of, mesh_of, options_of, start
from torchgpipe.base.devices import CPU
from torchgpipe.distributed import init_mesh
from torchgpipe.trainer import command, stream
from torchgpipe.trainer.processes import is_available
from torchgpipe.trainer.stream import DocumentReader, SplitDataset, TokenStream
from torchgpipe.trainer.tokenizer import BYTES

needs_gloo = pytest.mark.skipif(not is_available(), reason='needs gloo')

DOCUMENTS = ['one', 'a longer second', '', 'three']

#: Their bytes, each with the end of a document.
TEXT = b'one\na longer second\n\nthree\n'


class Documents:
    """An ``IterableDataset`` of rows, with the part of its interface that a reader uses."""

    def __init__(self, rows):
        self._rows = rows
        self._next = 0

    def __iter__(self):
        # A dataset that has loaded a state begins there each time.
        begin = self._next
        for index in range(begin, len(self._rows)):
            self._next = index + 1
            yield self._rows[index]
        self._next = begin

    def state_dict(self):
        return {'next': self._next}

    def load_state_dict(self, state):
        self._next = state['next']


def documents(texts=DOCUMENTS):
    return Documents([{'text': text} for text in texts])


def test_tokens_follow_each_other_in_epochs():
    reader = DocumentReader(documents(), BYTES)
    pieces = [reader.take(count) for count in (1, 2, 9, 20, 31)]
    whole = TEXT * 4
    begin = 0
    for count, piece in zip((1, 2, 9, 20, 31), pieces):
        assert bytes(piece.tolist()) == whole[begin : begin + count + 1]
        begin += count
    assert reader.epochs == 63 // len(TEXT)


@pytest.mark.parametrize('held_out', [0, 3, 4, 5, 20])
def test_tokens_continue_at_any_position(held_out):
    """Also in a document whose first tokens are held out, and after an epoch."""
    reader = DocumentReader(documents(), BYTES)
    if held_out:
        assert bytes(reader.take(held_out).tolist()) == TEXT[: held_out + 1]
    reader.held_out = held_out
    epoch = TEXT[held_out:]
    position = None
    for step in range(30):
        # A reader that begins again for each step, at the position of the one before.
        if position is not None:
            reader = DocumentReader(documents(), BYTES)
            reader.held_out = held_out
            reader.seek(json.loads(json.dumps(position)))
        taken = bytes(reader.take(3).tolist())
        begin = 3 * step % len(epoch)
        assert taken == (epoch * 9)[begin : begin + 4]
        position = reader.position


def test_a_dataset_without_text_is_refused():
    with pytest.raises(ValueError, match="no text in a column 'text'.*columns are words, label"):
        DocumentReader(Documents([{'words': 'a', 'label': 1}]), BYTES).take(1)
    with pytest.raises(ValueError, match='0 tokens only'):
        DocumentReader(documents([]), BYTES).take(1)


@pytest.fixture(autouse=True)
def no_thread_of_a_dataset(monkeypatch):
    """End the threads of all datasets after the test."""
    opened = []
    init = SplitDataset.__init__

    def open_dataset(self, config):
        opened.append(self)
        init(self, config)

    monkeypatch.setattr(SplitDataset, '__init__', open_dataset)
    yield
    for dataset in opened:
        dataset._thread.shutdown()


@pytest.fixture
def splits(monkeypatch):
    """Let a dataset have some splits."""

    def let(**texts):
        datasets = {name: documents(split) for name, split in texts.items()}
        monkeypatch.setattr(stream, 'load_splits', lambda name: copy.deepcopy(datasets))

    return let


WORDS = '--dataset a-name --global-batch-size 2 --micro-batch-size 1 --block-size 4'.split()


def test_a_validation_has_a_split_or_the_first_tokens(tmp_path, splits):
    config = options_of(tmp_path, *WORDS, '--eval-batches', 1)
    splits(train=DOCUMENTS, test=['the test'], validation=['a validation'])
    dataset = SplitDataset(config)
    assert bytes(dataset.val.tolist()) == b'a validat'[:9]
    assert bytes(dataset.batch()[0].tolist()) == TEXT[:9]

    splits(train=DOCUMENTS)
    dataset = SplitDataset(config)
    assert bytes(dataset.val.tolist()) == TEXT[:9]
    epoch = TEXT[8:]
    for step in range(6):
        tokens, _ = dataset.batch()
        assert bytes(tokens.tolist()) == (epoch * 9)[8 * step : 8 * step + 9]
    assert dataset.describe()['held_out'] == 8


def test_a_dataset_that_is_too_small_is_refused(tmp_path, splits):
    splits(train=DOCUMENTS)
    with pytest.raises(ValueError, match='no 33 tokens, of which 32 are held out'):
        SplitDataset(options_of(tmp_path, *WORDS, '--eval-batches', 4))
    with pytest.raises(ValueError, match='give --eval-batches 1 or more'):
        SplitDataset(options_of(tmp_path, *WORDS, '--eval-batches', 0))
    splits(train=DOCUMENTS, test=['abc'])
    with pytest.raises(ValueError, match='there are 4 tokens to validate with'):
        SplitDataset(options_of(tmp_path, *WORDS))
    with pytest.raises(ValueError, match='there is a token 99'):
        SplitDataset(options_of(tmp_path, *WORDS, '--vocab-size', 90))
    splits(train=['z' * 99], test=DOCUMENTS)
    with pytest.raises(ValueError, match='there is a token 122'):
        SplitDataset(options_of(tmp_path, *WORDS, '--vocab-size', 122)).batch()
    splits(test=DOCUMENTS)
    with pytest.raises(ValueError, match='no split train, but test'):
        SplitDataset(options_of(tmp_path, *WORDS))


@needs_gloo
def test_samples_of_replicas(tmp_path, splits):
    splits(train=['abcdefghij' * 9], validation=['a validation'])
    config = options_of(tmp_path, *WORDS, *'--data 2 --global-batch-size 4'.split())
    init_mesh(device_type='cpu')
    try:
        data = TokenStream(config)
        first, second = data.batch(0, 0, CPU), data.batch(1, 1, CPU)
    finally:
        dist.destroy_process_group()
    # Samples 0 and 2 of the first step, and 1 and 3 of the second one.
    assert first.starts == [0, 8] and second.starts == [20, 28]
    text = 'abcdefghij' * 9
    for samples in (first, second):
        for x, y, begin in zip(samples.x, samples.y, samples.starts):
            assert bytes(x.tolist()).decode() == text[begin : begin + 4]
            assert bytes(y.tolist()).decode() == text[begin + 1 : begin + 5]


@needs_gloo
def test_a_failure_of_the_first_rank_is_raised_on_all(tmp_path, splits):
    splits(train=['abc'], validation=['a validation'])
    config = options_of(tmp_path, *WORDS)
    init_mesh(device_type='cpu')
    try:
        data = TokenStream(config)
        data._dataset._reader._rows = iter([{'text': None}])
        with pytest.raises(
            RuntimeError, match='the first rank cannot read the dataset: ValueError'
        ):
            data.batch(0, 0, CPU)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with texts, each of which is a document."""
    pytest.importorskip('datasets')
    monkeypatch.setattr(tqdm, 'monitor_interval', 0)  # else its thread stays
    folder = tmp_path / 'texts'
    folder.mkdir()
    for index in range(6):
        folder.joinpath(f'{index}.txt').write_text(f'document {index}\n' * (5 + 9 * index))
    return folder


@pytest.mark.tools
def test_a_folder_of_text(folder):
    reader = DocumentReader(stream.load_splits(str(folder))['train'], BYTES)
    whole = b''
    for index in range(6):
        whole += folder.joinpath(f'{index}.txt').read_bytes() + b'\n'
    taken = b''
    for _ in range(60):
        taken += bytes(reader.take(50).tolist()[:50])
        again = DocumentReader(stream.load_splits(str(folder))['train'], BYTES)
        again.seek(json.loads(json.dumps(reader.position)))
        begin = len(taken) % len(whole)
        assert bytes(again.take(300).tolist()) == (whole * 3)[begin : begin + 301]
    assert taken == (whole * 9)[:3000]


@pytest.mark.tools
@pytest.mark.distributed
@needs_gloo
@pytest.mark.parametrize('pipe', [1, 2])
def test_a_training_resumes_in_the_middle_of_a_dataset(tmp_path, folder, pipe):
    words = ['--dataset', folder, '--eval-batches', 1, '--save-interval', 3, '--async-save']
    expected = launched(tmp_path / 'whole', *words)
    save = ['--save', tmp_path / 'saved', '--log-samples']
    config = options_of(tmp_path / 'cut', *words, *save, '--data', 2)
    with pytest.raises(SystemExit):
        start(killing.killed_at_a_step, config, (0, 5))
    again = launched(tmp_path / 'cut', *words, *save, *mesh_of(1, pipe, 1), '--resume')
    assert_same(again, expected)
    starts = []
    for path in ('log.0', 'log.1'):
        for line in lines_of(tmp_path / 'cut' / path):
            starts += line['starts']
    block, batch = config.block_size, config.global_batch_size
    assert sorted(starts) == [block * index for index in range(6 * batch)]


@pytest.mark.tools
@needs_gloo
def test_the_command_refuses_a_dataset_that_it_cannot_read(run, tmp_path, folder):
    words = [*TINY, '--output', tmp_path, '--dataset']
    code, _, err = run(*words, tmp_path / 'empty-name')
    assert code == 2 and 'cannot read the data' in err and err.count('\n') == 1
    code, _, err = run(*words, folder, '--tokenizer', tmp_path / 'no-tokenizer')
    assert code == 2 and 'cannot load --tokenizer' in err
    assert command.describe_data(options_of(tmp_path, '--dataset', folder))['held_out']
    code, out, err = run(*words, folder, '--eval-batches', 1, '--generate', 5)
    assert code == 0 and 'validation loss' in out, err
