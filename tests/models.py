"""Models in common shapes, as sequential modules of plain layers.

The models of the page on transformers are taken from that page, which has them in full.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe
from tests.project.test_docs import blocks
from torchgpipe import Arguments, NoChunk
from torchgpipe.skip import Namespace, pop, skippable, stash

PAGE = Path(torchgpipe.__file__).parent.parent / 'docs/guide/transformers.md'


def section(heading):
    """Run the first block of Python below a heading; give its names."""
    code = next(
        code
        for language, code, *_ in blocks(PAGE.read_text().partition(f'\n## {heading}\n')[2])
        if language == 'python'
    )
    module = sys.modules.setdefault(f'tests.models.{heading}', ModuleType(heading))
    exec(compile(code, f'{PAGE}: {heading}', 'exec'), module.__dict__)
    return module


gpt_page, bert_page, llama_page, t5_page = map(
    section,
    ['GPT', 'BERT with a mask', 'Llama with rotary tables', 'T5 with an encoder and a decoder'],
)


def ids(size, length=7, words=13):
    """Return sequences of tokens, of shape (size, length)."""
    return torch.randint(words, (size, length))


def gpt():
    """Return a GPT."""
    return gpt_page.gpt(words=13, length=8, width=8, heads=2, depth=3)


def bert():
    """Return a BERT."""
    return bert_page.bert(words=13, length=8, width=8, heads=2, depth=2)


def bert_sample(size):
    """Return ids and a mask, or ids alone every other time."""
    if size % 2:
        return Arguments(ids(size))
    mask = torch.rand(size, 7) < 0.7
    mask[:, 0] = True
    return Arguments(ids(size), attention_mask=mask, token_type_ids=ids(size, words=2))


def llama():
    """Return a Llama."""
    return llama_page.llama(words=13, width=8, heads=2, groups=1, depth=2)


def llama_sample(size):
    """Return ids and a rotary table."""
    return Arguments(ids(size), NoChunk(llama_page.rotary(7, 4).double()))


def t5():
    """Return a T5."""
    return t5_page.t5(words=13, width=8, heads=2, depth=2)


def t5_sample(size):
    """Return ids for the encoder and the decoder, and a mask."""
    mask = torch.arange(7) < torch.randint(3, 8, (size, 1))
    return Arguments(ids(size), ids(size, 5), mask=mask)


class Stem(nn.Conv2d):
    """Take images and targets."""

    def forward(self, image, targets=None):
        return {'features': [super().forward(image)], 'targets': targets}


class Shrink(nn.Module):
    """Add features of half the size."""

    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, 2, 1), nn.GroupNorm(2, channels), nn.SiLU()
        )

    def forward(self, value):
        *_, last = features = value['features']
        return {**value, 'features': [*features, self.layers(last)]}


class Pyramid(nn.Module):
    """Let all levels see the coarser ones."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def forward(self, value):
        fine, *coarse = value['features']
        for each in coarse:
            fine = fine + F.interpolate(self.conv(each), size=fine.shape[-2:])
        return {**value, 'features': (fine, *coarse)}


class Detect(nn.Module):
    """Return scores and boxes for each place of all levels."""

    def __init__(self, channels, classes):
        super().__init__()
        self.scores, self.boxes = nn.Conv2d(channels, classes, 1), nn.Conv2d(channels, 4, 1)

    def forward(self, value):
        def over_levels(layer):
            return torch.cat([layer(x).flatten(2).mT for x in value['features']], 1)

        return {
            'scores': over_levels(self.scores),
            'boxes': over_levels(self.boxes).sigmoid(),
            'targets': value['targets'],
        }


class Losses(nn.Module):
    """Compare with the targets, where there are some; sums, as numbers of targets differ."""

    def forward(self, value):
        targets, boxes, scores = value['targets'], value['boxes'], value['scores']
        found = {'scores': scores.softmax(-1), 'boxes': boxes, 'losses': None}
        if targets is not None:
            number = targets['boxes'].shape[1]
            apart = (boxes[:, :number] - targets['boxes']).abs().sum(-1)
            wrong = F.cross_entropy(scores[:, :number].mT, targets['labels'], reduction='none')
            found['losses'] = {
                'boxes': (apart * targets['valid']).sum(),
                'labels': (wrong * targets['valid']).sum(),
                'number': targets['valid'].sum(),
            }
        return found


def detector():
    """Return a detector with dicts in and out."""
    return nn.Sequential(
        Stem(3, 4, 3, padding=1), Shrink(4), Shrink(4), Pyramid(4), Detect(4, 5), Losses()
    )


def detector_sample(size):
    """Return images and padded targets."""
    valid = torch.rand(size, 3) < 0.6
    valid[0, 0] = True
    return Arguments(
        image=torch.rand(size, 3, 8, 8).double(),
        targets={
            'boxes': torch.rand(size, 3, 4).double(),
            'labels': torch.randint(5, (size, 3)),
            'valid': valid,
        },
    )


def detector_loss(found):
    """Return the loss of a mini-batch."""
    losses = found['losses']
    return (losses['boxes'] + losses['labels']) / losses['number'] + found['boxes'].mean()


class Time(nn.Module):
    """Embed the time of diffusion."""

    def __init__(self, inputs, channels):
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels, 3, padding=1)
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.SiLU())
        self.channels = channels

    def forward(self, x, time, context=None):
        angles = time[:, None] * 0.5 ** torch.arange(self.channels // 2, device=time.device)
        waves = torch.cat([angles.sin(), angles.cos()], 1)
        return {'x': self.conv(x), 'time': self.mlp(waves), 'context': context}


class Residual(nn.Module):
    """Convolve, at some time."""

    def __init__(self, inputs, outputs, channels):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time, self.short = nn.Linear(channels, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, value, x=None):
        x = value['x'] if x is None else x
        y = self.conv(F.silu(self.norm(x))) + self.time(value['time'])[:, :, None, None]
        return {**value, 'x': self.short(x) + y}


@skippable(stash=['level'])
class Down(nn.Module):
    """Go down a level."""

    def __init__(self, channels):
        super().__init__()
        self.residual = Residual(channels, channels, channels)

    def forward(self, value):
        value = self.residual(value)
        yield stash('level', value['x'])
        return {**value, 'x': F.avg_pool2d(value['x'], 2)}


class Middle(nn.Module):
    """Attend to the context, if there is one."""

    def __init__(self, channels):
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 2, batch_first=True)

    def forward(self, value):
        x = value['x'].flatten(2).mT
        context = x if value['context'] is None else value['context']
        y, _ = self.attention(x, context, context, need_weights=False)
        return {**value, 'x': value['x'] + y.mT.unflatten(2, value['x'].shape[2:])}


@skippable(pop=['level'])
class Up(nn.Module):
    """Go up a level."""

    def __init__(self, channels):
        super().__init__()
        self.residual = Residual(2 * channels, channels, channels)

    def forward(self, value):
        level = yield pop('level')
        x = F.interpolate(value['x'], scale_factor=2.0)
        return self.residual(value, torch.cat([x, level], 1))


class Noise(nn.Conv2d):
    """Return the noise."""

    def forward(self, value):
        return super().forward(value['x'])


def diffusion():
    """Return a U-Net of diffusion."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Time(3, 4),
        Down(4).isolate(outer),
        Down(4).isolate(inner),
        Middle(4),
        Up(4).isolate(inner),
        Up(4).isolate(outer),
        Noise(4, 3, 3, padding=1),
    )


def diffusion_sample(size):
    """Return images, times, and a context every other time."""
    context = torch.rand(size, 3, 4).double() if size % 2 else None
    return Arguments(
        torch.rand(size, 3, 8, 8).double().requires_grad_(),
        torch.rand(size).double(),
        context=context,
    )


def mean_square(value):
    """Return a loss of all tensors of a value."""
    tensors = value.values() if isinstance(value, dict) else [value]
    return sum(x.square().mean() for x in tensors)


#: Each with a function from batch size to sample, a loss, options, and three partitions.
MODELS = {
    'GPT': SimpleNamespace(make=gpt, sample=ids, balance=[2, 2, 2]),
    'BERT': SimpleNamespace(make=bert, sample=bert_sample, balance=[1, 2, 1]),
    'Llama': SimpleNamespace(make=llama, sample=llama_sample, balance=[2, 2, 2]),
    'T5': SimpleNamespace(make=t5, sample=t5_sample, balance=[2, 2, 3]),
    'detector': SimpleNamespace(
        make=detector,
        sample=detector_sample,
        loss=detector_loss,
        balance=[2, 1, 3],
        options={'gather': {'losses': 'sum'}},
    ),
    'diffusion': SimpleNamespace(make=diffusion, sample=diffusion_sample, balance=[2, 2, 3]),
}
