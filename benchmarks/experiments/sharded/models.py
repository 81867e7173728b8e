"""Models that processes share: a GPT, the last layer of ArcFace, and ResNet-18 before it.

ArcFace's last layer (Deng et al. 2018, arXiv 1801.07698) is whole, and split over processes. The
score of a class is 64 times the cosine of the angle between the features and the direction of the
class. In training, 0.5 is added to the angle of the target class alone.

ResNet-18 (He et al., "Deep Residual Learning", 2015) is without its last layer:

====================  ==========================================
head                  conv 7×7/2, bn, ReLU, max pool 3×3/2
stages                2 basic blocks each, of 64, 128, 256, 512 channels
tail                  global average pool, flatten
parameters            11,176,512; 11,689,512 with 1,000 classes
====================  ==========================================

The GPT of `torchgpipe.trainer.gpt`, split over the processes of a parallel group by its plan.

Its parameters have the same names and, after the same seed, each rank's have its part of the same
values::

    wte       some tokens of the vocabulary                   (vocabulary / n, width)
    c_attn    whole heads: their queries, keys and values     (3 width / n, width)
    c_proj    takes the features of these heads               (width, width / n)
    c_fc      some features                                   (4 width / n, width)
    c_proj    takes these features                            (width, 4 width / n)
    lm_head   the scores of some tokens                       (vocabulary / n, width)

All ranks of the group read the same batch. Norms and positions are whole on each. They stay equal,
because their gradients are equal by construction.
"""

from fnmatch import fnmatchcase
from math import cos, pi, sin

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

import torchgpipe.shard as ts
from torchgpipe.trainer.gpt import GPT, Sizes, tensor_plan


def sharded_gpt(sizes: Sizes) -> GPT:
    """Return a GPT that gives the scores of this rank's tokens: (N, T, vocabulary / n).

    Raises:
        ValueError: The ranks of the group cannot have whole heads each.
    """
    ranks = ts.distributed.get_group_size()
    if sizes.heads % ranks:
        raise ValueError(
            f'{sizes.heads} heads cannot be shared by {ranks} processes: each '
            'has as many, and whole ones'
        )
    model = GPT(sizes)
    for pattern, style in tensor_plan().items():
        for name, layer in [*model.named_modules()]:
            if fnmatchcase(name, pattern):
                model.set_submodule(name, _sharded(layer, isinstance(style, ColwiseParallel)))
    if sizes.tied:
        model.lm_head.weight = model.transformer.wte.weight
    return model


def _sharded(layer: nn.Module, columns: bool) -> nn.Module:
    """Return this rank's part of a layer."""
    dim = 1 if columns else 0
    if isinstance(layer, nn.Embedding):
        return ts.nn.ParallelEmbedding(
            layer.num_embeddings, layer.embedding_dim, _weight=layer.weight, dim=dim
        )
    sharded = ts.nn.ParallelLinear.convert_parallel_linear(layer, dim=dim)
    if not columns:  # The tensor between two layers has lost its tag.
        tag = ts.nn.RegisterParallelDim(-1)
        sharded.register_forward_pre_hook(lambda _, inputs: tag(inputs))
    return sharded


SCALE, MARGIN = 64.0, 0.5


class ArcFace(nn.Module):
    """The scores of all classes, (N, classes), for features, (N, features).

    Args:
        features: The number of features.
        classes: The number of classes.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Return scores; with a margin if there are targets, of shape (N,)."""
        cosines = F.linear(F.normalize(x), F.normalize(self.weight))
        if target is not None:
            cosines = _with_margin(cosines, target, torch.arange(len(self.weight)))
        return SCALE * cosines


class ShardedArcFace(ts.nn.ParallelModule):
    """The scores of this rank's classes, (N, classes / n): a shard, for the parallel loss.

    Args:
        features: The number of features.
        classes: The number of classes, of all ranks.
    """

    weight: nn.Parameter

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.register_part('weight', (classes, features), dim=1)
        ts.nn.init.shard_init_helper_(nn.init.xavier_uniform_, self.weight)
        ranks, rank = ts.distributed.get_group_size(), ts.distributed.get_rank()
        self.classes = ts.slice(torch.arange(classes), ranks)[rank]

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """Return scores; with a margin if there are targets, of shape (N,), of all classes."""
        directions = F.normalize(self.weight)
        ts.register_parallel_dim(directions, 1)
        cosines = ts.nn.functional.parallel_linear(F.normalize(x), directions)
        if target is not None:
            cosines = _with_margin(cosines, target, self.classes)
        scores = SCALE * cosines
        ts.register_parallel_dim(scores, -1)
        return scores


def _with_margin(cosines: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """Add the margin to the angles of targets, as far as they are among some classes."""
    places = (target[:, None] == classes).nonzero(as_tuple=True)
    cosine = cosines[places]
    # Where the cosine is 1, the angle has no gradient.
    more = (cosine.clamp(-1 + 1e-7, 1 - 1e-7).acos() + MARGIN).cos()
    # From π on, a larger angle would be a better one. So there it is the cosine that is lowered.
    return cosines.index_put(
        places, torch.where(cosine > cos(pi - MARGIN), more, cosine - MARGIN * sin(MARGIN))
    )


#: The features of an image.
FEATURES = 512


class BasicBlock(nn.Module):
    """Two convolutions, and their input added."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.layers(x) + self.shortcut(x))
        return y


def resnet18() -> nn.Sequential:
    """Make the layers, from images (batch, 3, height, width) to features (batch, 512)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage in range(4):
        out = 64 << stage
        stride = 1 if stage == 0 else 2
        layers += [BasicBlock(channels, out, stride), BasicBlock(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten())
