"""Routing: the tokens of all ranks that fit each expert's capacity, in one order at all scales.

Tokens queue at the experts that they chose: first choices before second ones, then in the order of
ranks, and of tokens on a rank::

    expert 3    1st choices of rank 0, of rank 1, …    2nd choices of rank 0, …  │  dropped
                ◀────────────────────────── capacity ──────────────────────────▶ │

Ranks exchange their numbers of tokens for each expert, and each rank computes the places of its
own tokens. This takes experts × k numbers of each rank, in one collective.
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
    """The experts of this rank's tokens, and the numbers of other ranks' tokens.

    Args:
        pairs: The admitted pairs of a token and one of its choices, as ``token * k + choice``, in
            the order of experts.
        admitted: The number of pairs of each expert and rank, (experts, ranks), on the host.
        share: The share of each expert in all choices, including dropped ones.
    """

    pairs: Tensor
    admitted: Tensor
    share: Tensor


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row and their places; ties prefer the first."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]


def routes(chosen: Tensor, experts: int, capacity: float | None, is_wrong: Tensor,
           group: ProcessGroup | None) -> Routes:
    """Return the routes of tokens, after an exchange of numbers between ranks.

    Args:
        chosen: The experts that each token chose, (tokens, k), the first choice first.
        experts: The number of experts.
        capacity: An expert's largest share of all choices, in multiples of an even share; None
            takes all.
        is_wrong: Whether scores are not finite, so that the choices are invalid.
        group: The ranks; None if there are no others.

    Raises:
        ValueError: Scores of a rank are not finite. All ranks raise this error.
    """
    k, rank = chosen.size(1), 0 if group is None else group.rank()
    keys = (chosen * k + torch.arange(k, device=chosen.device)).reshape(-1)
    counts = keys.bincount(minlength=experts * k)
    told = torch.cat([counts, is_wrong.to(counts).view(1)])[None]
    if group is not None:
        told = all_gather(told, group, 0, [1] * group.size())
    table = told.cpu()  # The only wait of the host: it needs the sizes of the tensors to receive.
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
    """Return the numbers of admitted tokens from the queued ones: (experts, choices, ranks)."""
    if capacity is None:
        return line
    # In exact decimals: 1.1 · 50 are 55 places, and a little more in floating point.
    room = ceil(Fraction(str(capacity)) * int(line.sum()) / len(line))
    flat = line.flatten(1)
    before = (flat.cumsum(1) - flat).view_as(line)
    return (room - before).clamp(min=0).minimum(line)


def _not_finite(ranks: list[int]) -> ValueError:
    return ValueError(
        'tokens go to the experts with the largest scores, but scores are NaN or infinite on '
        f'ranks {ranks} along the data axis: look for what made the input or the router so, as a '
        'learning rate that is too large, or float16 where bfloat16 has the range')
