"""Tokens of a dataset of Hugging Face, which is streamed: neither downloaded nor indexed before.

::

    documents    │ Once upon a time │ The end │ …           in the order of the dataset
    tokens        8  15  16   23  ⏹   42   4  ⏹  …          ⏹ ends a document
    samples      │8  15  16│ 23  ⏹   42│ 4  ⏹  …            a sample also has the next token
                           ▲
                   position: the state of the dataset before a document, and a token in it

The first rank reads in a thread, and sends each batch to the others. A checkpoint has the
position after its step, so a training continues with the next token, on any mesh.
"""

import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.trainer.config import Config
from torchgpipe.trainer.tokenizer import BYTES, Tokenizer, load_tokenizer
from torchgpipe.trainer.tokens import Samples, check_tokens, digest_of

#: The names of splits to validate with, the preferred one first.
VALIDATION_SPLITS = 'validation', 'valid', 'val', 'test'

T = TypeVar('T')


class _Document(NamedTuple):
    """A document that is not used up."""

    #: The state of the dataset before it.
    state: dict[str, Any]
    #: Its tokens, or those after the ones that are held out.
    tokens: Tensor
    #: The number of its tokens that are held out.
    begin: int = 0


class DocumentReader:
    """The tokens of a dataset's documents, in order, epoch after epoch.

    Args:
        dataset: An ``IterableDataset`` that has not been iterated.
        tokenizer: The tokenizer.
    """

    def __init__(self, dataset: Any, tokenizer: Tokenizer) -> None:
        self._dataset_at_start = dataset
        self._tokenizer = tokenizer
        #: The number of tokens at the start of an epoch that are left out, from the next one on.
        self.held_out = 0
        #: The number of epochs that have ended.
        self.epochs = 0
        self._open(None)

    def _open(self, state: dict[str, Any] | None) -> None:
        # A dataset that has loaded a state begins there in each epoch, so each epoch has a copy.
        self._dataset = copy.deepcopy(self._dataset_at_start)
        if state is not None:
            self._dataset.load_state_dict(state)
        self._rows = iter(self._dataset)
        self._documents: deque[_Document] = deque()
        #: The number of tokens of the first document that are used up.
        self._offset = 0

    @property
    def position(self) -> dict[str, Any]:
        """The position of the next token.

        It is known after the first call of :meth:`take`, which reads a document.
        """
        document = self._documents[0]
        return {'dataset': document.state, 'offset': document.begin + self._offset}

    def seek(self, position: dict[str, Any]) -> None:
        """Continue at a position."""
        self._open(position['dataset'])
        self._offset = position['offset']

    def take(self, count: int) -> Tensor:
        """Return the next tokens, and one more, with which the next call begins."""
        end = self._offset + count + 1
        length = sum(len(document.tokens) for document in self._documents)
        while length < end:
            document = self._next_document()
            self._documents.append(document)
            length += len(document.tokens)
        tokens = torch.cat([document.tokens for document in self._documents])

        start = self._offset
        self._offset += count
        while self._offset >= len(self._documents[0].tokens):
            document = self._documents.popleft()
            self._offset -= len(document.tokens)
        return tokens[start:end]

    def _next_document(self) -> _Document:
        document = self._read_document()
        if document is not None:
            return document
        self.epochs += 1
        self._dataset = copy.deepcopy(self._dataset_at_start)
        self._rows = iter(self._dataset)
        return self._first_of_epoch()

    def _first_of_epoch(self) -> _Document:
        """Return the first document with tokens that are not held out."""
        length = 0
        while True:
            document = self._read_document()
            if document is None:
                raise ValueError(f'the dataset has {length} tokens only')
            length += len(document.tokens)
            if length > self.held_out:
                begin = len(document.tokens) - (length - self.held_out)
                return _Document(document.state, document.tokens[begin:], begin)

    def _read_document(self) -> _Document | None:
        """Return the next document of the epoch, or ``None`` at its end."""
        state = self._dataset.state_dict()
        row = next(self._rows, None)
        if row is None:
            return None
        return _Document(state, tokens_of(row, self._tokenizer))


def tokens_of(row: dict[str, Any], tokenizer: Tokenizer) -> Tensor:
    """Return the tokens of a document, and one for its end."""
    text = row.get('text')
    if not isinstance(text, str):
        raise ValueError(
            f"there is no text in a column 'text' of the dataset; its columns are {', '.join(row)}"
        )
    return torch.tensor([*tokenizer.encode(text), tokenizer.end], dtype=torch.int32)


def load_splits(name: str) -> Any:
    """Return the splits of a dataset, by their names.

    Args:
        name: ``NAME`` or ``NAME:CONFIG``, or a folder with files of text, each of which is a
            document, or with other files that ``datasets.load_dataset`` takes.

    Raises:
        ImportError: There is no datasets.
        OSError: There is no such dataset, or it cannot be reached.
        ValueError: The name or the files are not valid.
    """
    from datasets import load_dataset

    folder = Path(name)
    if not folder.is_dir():
        path, _, config = name.partition(':')
        return load_dataset(path, config or None, streaming=True)
    if any(folder.rglob('*.txt')):
        return load_dataset('text', data_dir=name, sample_by='document', streaming=True)
    return load_dataset(name, streaming=True)


class SplitDataset:
    """A dataset on the first rank: its tokens to validate with, and its batches to train with.

    Validation takes a split, if there is one. Otherwise it takes the first tokens of the split for
    training, which training leaves out in all epochs.

    Args:
        config: The options.

    Raises:
        ImportError: There is no datasets, or no transformers.
        OSError: There is no such dataset or tokenizer, or it cannot be reached.
        ValueError: There is no text, or too little.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, 'documents')
        self._next: Future[tuple[Tensor, dict[str, Any]]] | None = None
        tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else BYTES
        splits = load_splits(config.dataset)
        if 'train' not in splits:
            raise ValueError(f'the dataset has no split train, but {", ".join(splits)}')
        self._reader = DocumentReader(splits['train'], tokenizer)

        count = config.global_batch_size * config.eval_batches * config.block_size
        validation = [name for name in VALIDATION_SPLITS if name in splits]
        if validation:
            self.val = first_tokens(splits[validation[0]], tokenizer, count)
        else:
            self.val = self._hold_out(count)
        check_tokens(self.val, config.vocab_size)
        if len(self.val) <= config.block_size:
            raise ValueError(
                f'there are {len(self.val)} tokens to validate with, but --block-size '
                f'{config.block_size} takes {config.block_size + 1}'
            )

    def _hold_out(self, count: int) -> Tensor:
        """Return the first tokens, which training leaves out."""
        if not count:
            raise ValueError(
                f'the dataset has no split to validate with ({", ".join(VALIDATION_SPLITS)}): '
                'give --eval-batches 1 or more, to hold out the first tokens for it'
            )
        tokens = self._reader.take(count)
        if self._reader.epochs:
            raise ValueError(
                f'the dataset has no {count + 1} tokens, of which {count} are held out to '
                'validate with: give fewer --eval-batches, or a split named validation'
            )
        self._reader.held_out = count
        return tokens

    def describe(self) -> dict[str, Any]:
        """Return the properties of the data that cannot change during a training."""
        return {
            'dataset': self._config.dataset,
            'tokenizer': self._config.tokenizer,
            'held_out': self._reader.held_out,
            'digest': digest_of(self.val[: self._config.block_size + 1]),
        }

    def seek(self, position: dict[str, Any]) -> None:
        """Continue after a checkpoint."""
        self._reader.seek(position)

    def batch(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the tokens of a step, one more than it uses, and the position after it.

        A thread reads the next step's tokens meanwhile.
        """
        if self._next is None:
            self._next = self._thread.submit(self._read)
        batch = self._next.result()
        self._next = self._thread.submit(self._read)
        return batch

    def _read(self) -> tuple[Tensor, dict[str, Any]]:
        tokens = self._reader.take(self._config.tokens_per_step)
        check_tokens(tokens, self._config.vocab_size)
        return tokens, self._reader.position


def first_tokens(dataset: Any, tokenizer: Tokenizer, count: int) -> Tensor:
    """Return the first tokens of a dataset, and one more; or all of them, for a count of 0."""
    pieces = []
    length = 0
    for row in dataset:
        pieces.append(tokens_of(row, tokenizer))
        length += len(pieces[-1])
        if count and length > count:
            break
    if not pieces:
        return torch.zeros(0, dtype=torch.int32)
    tokens = torch.cat(pieces)
    return tokens[: count + 1] if count else tokens


class TokenStream:
    """The batches of a dataset on all ranks. Every rank must call every method.

    Args:
        config: The options.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._device = config.device
        #: On the first rank.
        self._dataset: SplitDataset
        self.val = self._from_first_rank(self._open)

    def _open(self) -> Tensor:
        self._dataset = SplitDataset(self._config)
        return self._dataset.val

    def _from_first_rank(self, read: Callable[[], T]) -> T:
        """Return a result of the first rank on all ranks.

        Raises:
            RuntimeError: The first rank cannot read. All ranks raise, so that none waits.
        """
        message: list[Any] = [None, None]
        cause = None
        if dist.get_rank() == 0:
            try:
                message[0] = read()
            except Exception as error:
                cause = error
                message[1] = f'{type(error).__name__}: {error}'
        dist.broadcast_object_list(message, device=self._device)
        result, failure = message
        if failure is not None:
            raise RuntimeError(f'the first rank cannot read the dataset: {failure}') from cause
        return result  # type: ignore[no-any-return]

    def seek(self, position: dict[str, Any]) -> None:
        """Continue after a checkpoint."""
        if dist.get_rank() == 0:
            self._dataset.seek(position)

    def batch(self, step: int, replica: int, device: torch.device) -> Samples:
        """Return the samples of a replica in a step, which counts from 0."""
        config = self._config
        block, batch = config.block_size, config.global_batch_size
        tokens, position = self._from_first_rank(lambda: self._dataset.batch())
        samples = tokens.unfold(0, block + 1, block).long()
        starts = block * torch.arange(step * batch, (step + 1) * batch)

        share = (config.chunks, config.data, config.micro_batch_size)
        samples = samples.view(*share, block + 1)[:, replica].flatten(0, 1).to(device)
        starts = starts.view(share)[:, replica].flatten()
        return Samples(samples[:, :-1], samples[:, 1:], starts.tolist(), position)
