"""Tokenizers: of bytes, and of Hugging Face."""

import pytest

from torchgpipe.trainer.tokenizer import BYTES, load_tokenizer


def test_bytes_of_a_text():
    tokens = BYTES.encode('é\n')
    assert tokens == [0xC3, 0xA9, 0x0A]
    assert BYTES.decode(tokens) == 'é\n' and max(tokens) < BYTES.vocabulary
    assert BYTES.decode([0xC3]) == '�'


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of words, in a folder."""
    transformers = pytest.importorskip('transformers')
    tokenizers = pytest.importorskip('tokenizers')
    words = tokenizers.models.WordLevel({'a': 0, 'b': 1, '<end>': 2, '?': 3}, unk_token='?')
    model = tokenizers.Tokenizer(words)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def save(**options):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **options)
        fast.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.mark.tools
def test_a_tokenizer_of_a_folder(folder):
    tokenizer = load_tokenizer(folder(eos_token='<end>', model_max_length=2))
    assert tokenizer.encode('a b a') == [0, 1, 0]
    assert tokenizer.end == 2 and tokenizer.vocabulary == 4
    assert tokenizer.decode([0, 1]) == 'a b'


@pytest.mark.tools
def test_a_tokenizer_without_an_end_is_refused(folder):
    with pytest.raises(ValueError, match='no token for the end of a document'):
        load_tokenizer(folder())
