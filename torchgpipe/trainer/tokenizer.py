"""Tokenizers: of Hugging Face, or the bytes of a text."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Tokenizer(NamedTuple):
    """A mapping from texts to tokens, and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    #: The token after each document, which also begins a generated text.
    end: int
    #: The number of different tokens.
    vocabulary: int


def encode_bytes(text: str) -> list[int]:
    """Return the bytes of a text."""
    return [*text.encode()]


def decode_bytes(tokens: list[int]) -> str:
    """Return the text of some bytes, with a mark for each that is no text."""
    return bytes(token % 256 for token in tokens).decode(errors='replace')


BYTES = Tokenizer(encode_bytes, decode_bytes, ord('\n'), 256)


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer of Hugging Face.

    Args:
        name: Its name, or a folder.

    Raises:
        ImportError: There is no transformers.
        OSError: There is no such tokenizer.
        ValueError: It has no token for the end of a document.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    end = tokenizer.eos_token_id
    if end is None:
        end = tokenizer.sep_token_id
    if end is None:
        raise ValueError(f'the tokenizer {name} has no token for the end of a document')
    # Documents may be longer than the context of its model, for which it would warn.
    tokenizer.model_max_length = int(1e30)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return tokens

    return Tokenizer(encode, tokenizer.decode, end, len(tokenizer))
