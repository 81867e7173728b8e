"""ArcFace's last layer (Deng et al. 2018, arXiv 1801.07698), whole, and split over processes.

The score of a class is 64 times the cosine of the angle between the features and the direction of
the class. In training, 0.5 is added to the angle of the target class alone.
"""

from math import cos, pi, sin

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts

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
    own = cosines[places]
    # Where the cosine is 1, the angle has no gradient.
    more = (own.clamp(-1 + 1e-7, 1 - 1e-7).acos() + MARGIN).cos()
    # From π on, a larger angle would be a better one. So there it is the cosine that is lowered.
    return cosines.index_put(
        places, torch.where(own > cos(pi - MARGIN), more, own - MARGIN * sin(MARGIN))
    )
