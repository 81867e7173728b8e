"""Options: their names, their defaults, and the values that follow from them."""

import click
import pytest

from torchgpipe.trainer import config as options
from torchgpipe.trainer.config import Config, Size, complete, config_of, option_fields
from torchgpipe.trainer.train_gpt import learning_rate


def test_a_field_is_an_option():
    names = {item.name for item in option_fields()}
    assert names == {*Config.__dataclass_fields__} - {'balance', 'first_token'}
    assert config_of({'data': 2, 'pipe': None, 'shard': False}) == Config(data=2)


def test_a_default_text_exists():
    config = complete(Config(cpu=True))
    with open(config.text) as file:
        assert 'Apache License' in file.read(200)


def test_the_license_of_an_installed_package(monkeypatch, tmp_path):
    """Without a clone around the package, it is among its metadata."""
    monkeypatch.setattr(options, '__file__', str(tmp_path / 'a/b/config.py'))

    class Metadata:
        name = 'LICENSE'

        def locate(self):
            return tmp_path / 'LICENSE'

    monkeypatch.setattr(options.importlib.metadata, 'files', lambda name: [Metadata()])
    assert options.default_text() == str(tmp_path / 'LICENSE')
    monkeypatch.setattr(options.importlib.metadata, 'files', lambda name: None)
    with pytest.raises(click.UsageError, match='give a text, by --text FILE'):
        options.default_text()


def test_sizes_of_memory():
    convert = Size().convert
    assert convert('80GiB', None, None) == 80 * 2**30
    assert convert('1.5 kB'.replace('k', 'K'), None, None) == 1500
    for text in ('80', '0GiB', 'GiB', '1.GiB'):
        with pytest.raises(click.BadParameter, match='no size above zero'):
            convert(text, None, None)


def test_stages_of_the_host_memory_are_as_small_as_possible():
    for pipe, stages in ((1, 6), (2, 6), (4, 4)):
        config = complete(Config(cpu=True, offload=True, pipe=pipe, global_batch_size=16))
        assert len(config.balance) == stages and sum(config.balance) == 6


def test_the_least_learning_rate_follows_from_the_largest():
    assert complete(Config(cpu=True)).min_lr == 1e-4
    small = complete(Config(cpu=True, lr=6e-5))
    rates = [learning_rate(small, step) for step in range(small.steps)]
    assert max(rates) == pytest.approx(6e-5) and rates[-1] == pytest.approx(6e-6)
    assert complete(Config(cpu=True, min_lr=0.0)).min_lr == 0


def test_vocabularies():
    assert complete(Config(cpu=True)).vocab_size == 256
    assert complete(Config(cpu=True, dataset='a-name')).vocab_size == 256
    assert complete(Config(cpu=True, mock_data=True)).vocab_size == 50304
    small = complete(Config(cpu=True, mock_data=True, vocab_size=7))
    assert (small.vocab_size, small.first_token) == (7, 3)
