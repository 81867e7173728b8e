"""Trainings: ten steps with shards are ten steps of one process.

The models are typical uses of TorchShard: a classifier behind a convolutional backbone, ArcFace, a
GPT, and a layer and a loss of the user's own.
"""

from math import cos, pi, sin

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchgpipe.shard as ts
from tests.shard.plain import close, pair, part, replicas, whole
from tests.shard.processes import run
from tests.shard.test_parameter import Scale
from torchgpipe.shard.nn.functional import parallel_cross_entropy

OPTIMIZERS = [
    lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1),
    lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01),
]


def train(make, batches, plain_loss, wrap, max_norm):
    """Train both for ten steps with each optimizer, and compare losses, norms and values.

    Args:
        make: See `pair`.
        batches: Gives the whole batch of a step.
        plain_loss: Gives the loss of the plain model on a whole batch.
        wrap: Gives a function of a whole batch that gives the sharded model's loss on this rank,
            and a function to call after backward.
        max_norm: The maximum norm of gradients.
    """
    for number, optimizer in enumerate(OPTIMIZERS):
        plain, sharded = pair(make)
        sharded_loss, after = wrap(sharded)
        one, another = optimizer(plain.parameters()), optimizer(sharded.parameters())
        clipped = 0
        for step in range(10):
            batch = batches(torch.Generator().manual_seed(step))
            expected, loss = plain_loss(plain, *batch), sharded_loss(*batch)
            expected.backward()
            loss.backward()
            after()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            clipped += bool(norm > max_norm)
            found = {
                'loss': mean(loss),
                'norm': ts.clip_grad_norm_(sharded.parameters(), max_norm),
            }
            close(found, {'loss': expected.detach(), 'norm': norm}, 1e-9)
            for each in (one, another):
                each.step()
                each.zero_grad()
        assert clipped > 1
        close(whole(sharded), plain.state_dict(), 1e-9)


def mean(loss):
    """Average over all ranks, as all of a group have the same."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def of_the_group(*batch):
    """Return the part of a batch that all ranks of this group read."""
    return part(batch, *replicas())


def images(generator):
    """Return images and their classes."""
    return (
        torch.randn(8, 2, 5, 5, dtype=torch.double, generator=generator),
        torch.randint(7, (8,), generator=generator),
    )


# --- 1. a classifier behind a convolutional backbone
# --------------------------------------------------------------------------


class Classifier(nn.Module):
    """A backbone, and a last layer that is split."""

    def __init__(self, linear, embedding):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = linear(4, 7, dim=1)


def gathered(model):
    """Let each rank read its own samples, and gather features and targets over the group."""
    backbone = DistributedDataParallel(model.backbone)
    ts.register_ddp_gathered_features(backbone)

    def loss(*batch):
        x, y = part(batch, dist.get_rank(), dist.get_world_size())
        features, targets = (ts.distributed.gather(tensor, dim=0) for tensor in (backbone(x), y))
        logits = model.head(features)
        assert ts.distributed.gather(logits).argmax(1).shape == targets.shape
        return parallel_cross_entropy(logits, targets)

    return loss, lambda: ts.average_gradients(model.head)


def classify():
    """Train a classifier."""
    train(
        Classifier,
        images,
        lambda model, x, y: F.cross_entropy(model.head(model.backbone(x)), y),
        gathered,
        0.5,
    )


# --- 2. ArcFace
# ------------------------------------------------------------------------


class Faces(nn.Module):
    """Features, and a direction for each class."""

    def __init__(self, linear, embedding):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.Tanh(), nn.Linear(6, 6))
        self.classes = linear(6, 7, dim=1, bias=False)

    def forward(self, x, is_target):
        cosine = self.cosine(F.normalize(self.features(x)), F.normalize(self.classes.weight))
        sine = (1 - cosine.square()).clamp(min=1e-12).sqrt()
        with_margin = cosine * cos(0.5) - sine * sin(0.5)
        return 64 * torch.where(is_target & (cosine > cos(pi - 0.5)), with_margin, cosine)

    def cosine(self, features, directions):
        """Compute a column parallel layer's output from normalised weights."""
        if ts.get_parallel_dim(self.classes.weight) is None:
            return F.linear(features, directions)
        ts.register_parallel_attribute(directions, 1)
        return ts.nn.functional.parallel_linear(features, directions)


def wrapped(model):
    """Wrap all of it, and let all ranks of a group read the same batch."""
    ts.register_ddp_parameters_to_ignore(model)
    ddp = DistributedDataParallel(model)
    mine = ts.slice(torch.arange(7), ts.distributed.get_group_size())[ts.distributed.get_rank()]

    def loss(*batch):
        x, y = of_the_group(*batch)
        logits = ddp(x, y[:, None] == mine)
        ts.register_parallel_dim(logits, -1)
        return parallel_cross_entropy(logits, y)

    return loss, lambda: ts.average_gradients(ddp)


def recognise():
    """Train for ArcFace."""
    train(
        Faces,
        images,
        lambda model, x, y: F.cross_entropy(model(x, y[:, None] == torch.arange(7)), y),
        wrapped,
        5.0,
    )


# --- 3. a GPT
# ------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block of four heads, each of which is whole on a rank."""

    def __init__(self, linear):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = linear(8, 24, dim=1), linear(8, 8, dim=0)
        self.up, self.down = linear(8, 20, dim=1), linear(20, 8, dim=0)
        self.split = ts.nn.RegisterParallelDim(-1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, -1, 3, 2).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(self.split(heads.transpose(1, 2).flatten(2)))
        return x + self.down(self.split(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A small GPT over a vocabulary of 11."""

    tied = False

    def __init__(self, linear, embedding):
        super().__init__()
        self.words, self.places = embedding(11, 8, dim=0), nn.Embedding(6, 8)
        self.blocks = nn.Sequential(*(Block(linear) for _ in range(2)))
        self.norm = nn.LayerNorm(8)
        self.head = linear(8, 11, dim=1, bias=False)
        if self.tied:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(x.size(1)))
        return self.head(self.norm(self.blocks(x)))


class TiedGPT(GPT):
    """One whose head has the weight of the embedding."""

    tied = True


def same_batch(model):
    """Let all ranks of a group read the same batch, and average over groups."""

    def loss(*batch):
        x, y = of_the_group(*batch)
        return parallel_cross_entropy(model(x), y)

    return loss, lambda: ts.average_gradients(model)


def text(generator):
    """Return tokens and the next ones."""
    tokens = torch.randint(11, (4, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def write():
    """Train a GPT."""
    for kind in (GPT, TiedGPT):
        train(
            kind,
            text,
            lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()),
            same_batch,
            0.5,
        )


# --- 4. a layer and a loss of the user's own
# ------------------------------------------------------------------------------


class PlainScale(nn.Module):
    """Scale each feature."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * self.weight


class Own(nn.Module):
    """A layer that is split, and scales of its outputs."""

    def __init__(self, linear, embedding):
        super().__init__()
        self.layer = linear(50, 7, dim=1)
        self.scale = (Scale if linear is ts.nn.ParallelLinear else PlainScale)(7)

    def forward(self, x):
        return self.scale(self.layer(x.flatten(1)))


def own_loss(y, numbers, targets):
    """Add up the squared differences from 1 at the target, and from 0 elsewhere."""
    return (y - (numbers == targets[:, None]).double()).square().sum() / len(y)


def own(model):
    """Wrap all of it over the data axis, and add up the losses of the ranks of a group."""
    ddp = DistributedDataParallel(model, process_group=ts.distributed.get_data_group())
    mine = ts.slice(torch.arange(7), ts.distributed.get_group_size())[ts.distributed.get_rank()]

    def loss(*batch):
        x, y = of_the_group(*batch)
        return ts.distributed.reduce(own_loss(ddp(x), mine, y))

    return loss, lambda: None


def fit():
    """Train a layer of one's own with a loss of one's own."""
    train(Own, images, lambda model, x, y: own_loss(model(x), torch.arange(7), y), own, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    'world, group, trainings',
    [
        (2, 1, [classify]),
        (2, 2, [recognise, fit]),
        (4, 2, [classify, recognise, write, fit]),
        (4, 4, [write]),
    ],
)
def test_ten_steps_equal_one_process(world, group, trainings):
    for training in trainings:
        run(world, training, group=group)
