"""Embeddings whose rows are split over ranks: each rank looks up its rows, and has their gradient.

PyTorch's own lookup in such a weight has a gradient of all rows on each rank, of which the rank
then takes its part. With 128 Ki tokens, the whole is 8 or more times the weight of the rank.

::

    ids        7    0    4    2
    rank 0     0   [0]   0   [2]     rows 0 to 3        the others are zeros
    rank 1    [7]   0   [4]   0      rows 4 to 7
    sum        7    0    4    2      by the style: whole, or scattered by tokens
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional as F


def look_up_locally(module: nn.Module) -> None:
    """Replace the lookup of an embedding whose rows are split over ranks, if it is one."""
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return
    weight: Tensor = module.weight
    if not isinstance(weight, DTensor) or not weight.placements[-1].is_shard(0):
        return
    # These options need the counts or the norms of rows.
    is_plain = module.max_norm is None and not (module.sparse or module.scale_grad_by_freq)
    if is_plain:
        module.forward = MethodType(_look_up, module)  # type: ignore[method-assign]


def _look_up(module: Any, ids: Tensor) -> Tensor:
    """Return the rows of this rank, as a summand of the whole result.

    Args:
        ids: The numbers of rows of the whole weight, the same on all ranks: a tensor, or a DTensor
            that is whole.
    """
    weight = module.weight
    mesh = weight.device_mesh
    if isinstance(ids, DTensor):
        ids = ids.to_local()
    table = weight.to_local()
    rows = weight.size(0)
    begin = -(-rows // mesh.size()) * mesh.get_local_rank()
    end = begin + len(table)
    if not len(table):
        # A lookup needs a row. The last ranks may have none.
        table = torch.cat([table, table.new_zeros(1, table.size(1))])
    padding = None
    if module.padding_idx is not None and 0 <= module.padding_idx - begin < len(table):
        padding = module.padding_idx - begin

    is_here = (ids >= begin) & (ids < end)
    is_elsewhere = (ids >= 0) & (ids < rows) & ~is_here
    # A number that no rank has stays out of range, so that the lookup fails.
    places = (ids - begin).masked_fill(is_elsewhere, 0)
    vectors = F.embedding(places, table, padding)
    summand = vectors.masked_fill_(is_elsewhere[..., None], 0)
    return DTensor.from_local(summand, mesh, [Partial()], run_check=False)
