"""Routing: the tokens of all ranks that fit each expert's capacity, in one order at all scales.

Tokens stand in line at the experts that they chose: first choices before second ones, and then in
the order of ranks, and of tokens on a rank::

    expert 3    1st choices of rank 0, of rank 1, …    2nd choices of rank 0, …  │  dropped
                ◀────────────────────────── capacity ──────────────────────────▶ │

Ranks tell each other how many they have for each expert, so that each finds the places of its own
by itself: experts × k numbers of each rank, in one collective.
"""
from fractions import Fraction
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.shard.collectives import all_gather

__all__ = ['Routes', 'routes', 'top']


class Routes(NamedTuple):
    """Where the tokens of this rank go, and how many of other ranks go where.

    Args:
        pairs: Those pairs of a token and one of its choices that have room, as
            ``token * k + choice``, in the order of experts.
        admitted: How many of them each expert gets of each rank, (experts, ranks), on the host.
        share: The part of all choices that each expert has, with those that are dropped.
    """

    pairs: Tensor
    admitted: Tensor
    share: Tensor


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row, and where they are: of equal ones the first."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]


def routes(chosen: Tensor, experts: int, capacity: float | None, is_wrong: Tensor,
           group: ProcessGroup | None) -> Routes:
    """Return where tokens go, after ranks have told each other what they have.

    Args:
        chosen: The experts that each token chose, (tokens, k), the first choice first.
        experts: How many experts there are.
        capacity: How many times its even share of all choices an expert takes; None takes all.
        is_wrong: Whether scores are not finite, and the choices mean nothing.
        group: The ranks; None if there are no others.

    Raises:
        ValueError: On all ranks: scores of one are not finite.
    """
    k, rank = chosen.size(1), 0 if group is None else group.rank()
    keys = (chosen * k + torch.arange(k, device=chosen.device)).reshape(-1)
    counts = keys.bincount(minlength=experts * k)
    told = torch.cat([counts, is_wrong.to(counts).view(1)])[None]
    if group is not None:
        told = all_gather(told, group, 0, [1] * group.size())
    table = told.cpu()  # The one time that the host waits: it has to know what it gets.
    if table[:, -1].any():
        raise _not_finite(table[:, -1].nonzero()[:, 0].tolist())
    line = table[:, :-1].view(-1, experts, k).permute(1, 2, 0)
    admitted = _admitted(line, capacity)
    order = keys.argsort(stable=True)
    own = admitted[:, :, rank].reshape(-1).to(chosen.device)
    begin = counts.cumsum(0) - counts
    place = torch.arange(len(keys), device=chosen.device) - begin[keys[order]]
    share = line.sum((1, 2)).double() / line.sum()
    return Routes(order[place < own[keys[order]]], admitted.sum(1), share.to(chosen.device))


def _admitted(line: Tensor, capacity: float | None) -> Tensor:
    """Return how many have room, of so many that stand in line: (experts, choices, ranks)."""
    if capacity is None:
        return line
    # As it is written: 1.1 · 50 are 55 places, and a little more in floating point.
    room = ceil(Fraction(str(capacity)) * int(line.sum()) / len(line))
    flat = line.flatten(1)
    before = (flat.cumsum(1) - flat).view_as(line)
    return (room - before).clamp(min=0).minimum(line)


def _not_finite(ranks: list[int]) -> ValueError:
    return ValueError(
        'tokens go to the experts with the largest scores, but scores are NaN or infinite on '
        f'ranks {ranks} along the data axis: look for what made the input or the router so, as a '
        'learning rate that is too large, or float16 where bfloat16 has the range')
