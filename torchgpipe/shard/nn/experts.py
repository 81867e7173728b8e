"""Mixtures of experts: each token uses a few experts, which are spread over the replicas' ranks.

Tokens queue at the experts that they chose: first choices before second ones, then in the order of
ranks, and of tokens on a rank::

    expert 3    1st choices of rank 0, of rank 1, …    2nd choices of rank 0, …  │  dropped
                ◀────────────────────────── capacity ──────────────────────────▶ │

Ranks exchange their numbers of tokens for each expert, and each rank computes the places of its
own tokens. This takes experts × k numbers of each rank, in one collective.

::

    rank 0    tokens ── router ─┐        ┌─▶ experts 0, 1 ─┐        ┌─▶ × gate ──▶ output
                                ├ to all ┤                 ├ to all ┤
    rank 1    tokens ── router ─┘        └─▶ experts 2, 3 ─┘        └─▶ × gate ──▶ output

Each expert gets its tokens from all ranks. So its gradient is the sum over all of their losses,
and no other rank has a term to add.
"""

from collections.abc import Callable
from fractions import Fraction
from math import ceil, sqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.shard.collectives import all_gather, all_to_all, broadcast
from torchgpipe.shard.parameter import lengths


class Routes(NamedTuple):
    """The experts of this rank's tokens, and the numbers of other ranks' tokens.

    Args:
        pairs: The admitted pairs of a token and one of its choices, as ``token * k + choice``, in
            the order of experts.
        admitted: The number of pairs of each expert and rank, (experts, ranks), on the host.
    """

    pairs: Tensor
    admitted: Tensor
    #: The share of each expert in all choices, including dropped ones.
    share: Tensor


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row and their places; ties prefer the first."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]


def routes(
    chosen: Tensor,
    experts: int,
    capacity: float | None,
    is_wrong: Tensor,
    group: ProcessGroup | None,
) -> Routes:
    """Return the routes of tokens, after an exchange of numbers between ranks.

    Args:
        chosen: The experts that each token chose, (tokens, k), the first choice first.
        capacity: An expert's largest share of all choices, in multiples of an even share; None
            takes all.
        group: The ranks; None if there are no others.

    Raises:
        ValueError: Scores of a rank are not finite. All ranks raise this error.
    """
    k = chosen.size(1)
    rank = 0 if group is None else group.rank()
    keys = (chosen * k + torch.arange(k, device=chosen.device)).reshape(-1)
    counts = keys.bincount(minlength=experts * k)
    rows = torch.cat([counts, is_wrong.to(counts).view(1)])[None]
    if group is not None:
        rows = all_gather(rows, group, 0, [1] * group.size())
    table = rows.cpu()  # The only wait of the host: it needs the sizes of the tensors to receive.
    if table[:, -1].any():
        raise _not_finite(table[:, -1].nonzero()[:, 0].tolist())
    line = table[:, :-1].view(-1, experts, k).permute(1, 2, 0)
    admitted = _admitted(line, capacity)
    order = keys.argsort(stable=True)
    admitted_here = admitted[:, :, rank].reshape(-1).to(chosen.device)
    begin = counts.cumsum(0) - counts
    place = torch.arange(len(keys), device=chosen.device) - begin[keys[order]]
    share = line.sum((1, 2)).double() / line.sum()
    return Routes(
        order[place < admitted_here[keys[order]]], admitted.sum(1), share.to(chosen.device)
    )


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
        'learning rate that is too large, or float16 where bfloat16 has the range'
    )


#: The parameters with experts in their first dimension, except the router.
_OF_EXPERTS = ('up', 'up_bias', 'down', 'down_bias')


class Experts(nn.Module):
    """Networks of two linear maps, of which each token uses the ones that a router chooses for it.

    The layer follows GShard, Switch Transformer and ST-MoE. It returns a pair: the output, of the
    shape of the input, and an auxiliary loss for each token. Add the mean of that to the loss::

        y, aux = self.experts(x)
        ...
        loss = F.cross_entropy(logits, target) + aux.mean()

    In one process it has all experts. :class:`~torchgpipe.distributed.DistributedGPipe` spreads
    them over the ranks along its data axis, and :meth:`spread` does so elsewhere. Ranks may have
    any number of tokens, or none, and experts need not be divisible by ranks. Outputs, gradients
    and losses equal the results of one process with the tokens of all ranks, one after the other.

    Capacity and shares refer to the tokens of all ranks *in one call*: under a pipeline, of one
    micro-batch. Tokens are ordered by choice (first, second, …), then by rank along the data axis,
    then by their place in the memory of the input. Tokens beyond the capacity of an expert get no
    output from it. Among equal scores, the first expert is preferred.

    Args:
        width: The number of features of a token: the last dimension of the input.
        hidden: The number of features within an expert.
        experts: The number of experts, on all ranks together.
        k: The number of experts that each token uses. With 1, the output of an expert is
            multiplied by its probability. Otherwise it is multiplied by its part of the
            probabilities of the k experts, dropped or not.
        capacity: An expert takes at most ``ceil(capacity · k · tokens / experts)``; None: all.
        balance: The weight of the loss that balances the load. For a token it is ``experts · Σ
            share · probability``, with each expert's share of all choices. It is 1 if shares are
            even.
        z: The weight of the loss that keeps scores small: ``logsumexp(scores) ** 2``.
        activation: The function between the two linear maps.
        device: The device of the parameters.
        dtype: Their type.

    Raises:
        ValueError: ``k`` is not from 1 to ``experts``, or ``capacity`` is not positive and finite.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        k: int = 2,
        *,
        capacity: float | None = None,
        balance: float = 0.01,
        z: float = 0.001,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= k <= experts:
            raise ValueError(
                f'a token goes to at least one and at most all experts, but k={k}, '
                f'and there are {experts}: take a k from 1 to {max(experts, 1)}'
            )
        if capacity is not None and not 0 < capacity < float('inf'):
            raise ValueError(
                f'capacity is a number above 0, how many times its even share an '
                f'expert takes, not {capacity}: 1.25, say, or None to drop nothing'
            )
        self.width = width
        self.hidden = hidden
        self.experts = experts
        self.k = k
        self.capacity = capacity
        self.balance = balance
        self.z = z
        self.activation = activation

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = weight(experts, width)
        self.up = weight(experts, hidden, width)
        self.up_bias = weight(experts, hidden)
        self.down = weight(experts, width, hidden)
        self.down_bias = weight(experts, width)
        self.reset_parameters()

    @property
    def communicates(self) -> bool:
        """Whether other ranks have some of the experts: see :mod:`torchgpipe.base.context`."""
        return self._group is not None

    @property
    def _group(self) -> ProcessGroup | None:
        """The ranks that have the experts, by the mesh of the weights."""
        mesh = getattr(self.up, 'device_mesh', None)
        return None if mesh is None else mesh.get_group()

    def reset_parameters(self) -> None:
        """Set initial values, as ``nn.Linear`` does, for each expert and the router."""
        for x, inputs in (
            (self.router, self.width),
            (self.up, self.width),
            (self.up_bias, self.width),
            (self.down, self.hidden),
            (self.down_bias, self.hidden),
        ):
            nn.init.uniform_(x, -1 / sqrt(inputs), 1 / sqrt(inputs))

    def spread(self, mesh: DeviceMesh) -> 'Experts':
        """Keep this rank's experts only: consecutive ones, as ``torch.chunk`` splits them.

        All ranks of the mesh call it, before an optimizer is made. They get the values of the
        first one, or values later if the experts are on the meta device. Then weights of experts
        are DTensors; the router stays whole on each rank. The gradient of a spread weight is the
        sum over the losses of all ranks, complete on the rank that has it. So for the loss of one
        process, add up the losses of ranks and the gradients of other parameters; or let
        :func:`ts.average_gradients` take the mean of both.

        Args:
            mesh: The ranks, along one axis, such as ``mesh['data']``.

        Raises:
            ValueError: The mesh has several axes, or the experts are spread already.
        """
        from torch.distributed.tensor import Shard, distribute_tensor  # takes long

        if mesh.ndim != 1 or self.communicates:
            state = 'spread already' if self.communicates else 'whole'
            raise ValueError(
                'experts are spread once, over one axis of a mesh, as mesh["data"]; here are axes '
                f'{mesh.mesh_dim_names}, and experts that are {state}'
            )
        if not self.router.is_meta:
            broadcast(self.router.detach(), mesh.get_group())
        for name in _OF_EXPERTS:
            full = getattr(self, name)
            setattr(
                self,
                name,
                nn.Parameter(
                    distribute_tensor(full.detach(), mesh, [Shard(0)]), full.requires_grad
                ),
            )
        return self

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that :meth:`spread` splits over ranks."""
        return [getattr(self, name) for name in _OF_EXPERTS]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the auxiliary loss of each token: ``x.shape[:-1]``.

        Raises:
            ValueError: The input has another width, or scores of a rank are not finite.
        """
        if x.size(-1) != self.width:
            raise ValueError(
                f'these experts take tokens of {self.width} features, in the last '
                f'dimension, but the input is of shape {tuple(x.shape)}'
            )
        tokens = x.reshape(-1, self.width)
        group = self._group
        scores = _scores(tokens, self.router)
        chances = scores.softmax(-1)
        gates, chosen = top(chances, self.k)
        if self.k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        routed = routes(chosen, self.experts, self.capacity, ~scores.isfinite().all(), group)
        balance = self.experts * (chances @ routed.share.to(chances))
        aux = self.balance * balance + self.z * scores.logsumexp(-1).square()

        sent = _cast(tokens)[routed.pairs // self.k]
        outputs = self._at_experts(sent, routed.admitted, group)
        # Each pair has its own row, so that no sum depends on a random order.
        rows = outputs.new_zeros(gates.numel(), self.width).index_copy(0, routed.pairs, outputs)
        y = (rows.view(-1, self.k, self.width) * gates.to(rows.dtype)[..., None]).sum(1)
        return y.view(x.shape), aux.view(x.shape[:-1])

    def _at_experts(self, rows: Tensor, admitted: Tensor, group: ProcessGroup | None) -> Tensor:
        """Return the experts' outputs for rows in the order of experts, on any rank."""
        if group is None:
            return self._run(rows, admitted[:, 0].tolist())
        rank = group.rank()
        parts = admitted.split(lengths(self.experts, group.size()))
        local = parts[rank]
        send = [int(part[:, rank].sum()) for part in parts]
        receive = local.sum(0).tolist()
        received = _exchange(rows, send, receive, group)
        # Rows are received by rank, then by expert, and are needed by expert, then by rank.
        numbers = torch.arange(len(local), device=rows.device).repeat(group.size())
        counts = local.t().reshape(-1).to(rows.device)
        by_expert = numbers.repeat_interleave(counts, output_size=len(received))
        order = by_expert.argsort(stable=True)
        y = self._run(received[order], local.sum(1).tolist())
        return _exchange(y[order.argsort()], receive, send, group)

    def _run(self, rows: Tensor, numbers: list[int]) -> Tensor:
        """Apply each expert of this rank to its number of rows."""
        weights = [_local(x) for x in self.spread_parameters()]
        if not numbers:  # Weights without elements also need a gradient.
            return rows + sum(x.sum() for x in weights)
        experts = zip(*(weight.unbind() for weight in weights))
        outputs = []
        for x, (up, up_bias, down, down_bias) in zip(rows.split(numbers), experts):
            hidden = self.activation(F.linear(x, up, up_bias))
            outputs.append(F.linear(hidden, down, down_bias))
        return torch.cat(outputs)

    def extra_repr(self) -> str:
        """Return its sizes."""
        return (
            f'{self.width}, hidden={self.hidden}, experts={self.experts}, k={self.k}, '
            f'capacity={self.capacity}'
        )


def _scores(tokens: Tensor, router: Tensor) -> Tensor:
    """Return the scores of experts for tokens, in float32 at least, because choices need it."""
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    with torch.autocast(tokens.device.type, enabled=False):
        return F.linear(tokens.to(dtype), router.to(dtype))


def _cast(x: Tensor) -> Tensor:
    """Cast a tensor to the type of a linear map under autocast, before it is sent."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _local(x: Tensor) -> Tensor:
    """Return this rank's part of a weight, connected to it in the graph."""
    local: Tensor = x.to_local() if hasattr(x, 'to_local') else x
    return local


def _exchange(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Send rows to all ranks of a group, and return the received rows, in order."""
    received: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        x, send, receive, group
    )
    return received


class _Exchange(torch.autograd.Function):
    """Exchange rows; backward exchanges gradients in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: ProcessGroup
    ) -> Tensor:
        """Send rows."""
        ctx.back = receive, send, group
        return all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Send gradients."""
        return _exchange(grads[0], *ctx.back), None, None, None
