"""The GPT of `torchgpipe.trainer.gpt`, split over the processes of a parallel group by its plan.

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

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

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
    if isinstance(layer, nn.Embedding):
        return ts.nn.ParallelEmbedding(
            layer.num_embeddings,
            layer.embedding_dim,
            _weight=layer.weight,
            dim=1 if columns else 0,
        )
    found = ts.nn.ParallelLinear.convert_parallel_linear(layer, dim=1 if columns else 0)
    if not columns:  # The tensor between two layers has lost its tag.
        tag = ts.nn.RegisterParallelDim(-1)
        found.register_forward_pre_hook(lambda _, inputs: tag(inputs))
    return found
