"""Private names for modules and nested values."""
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from torchgpipe.private.lookup import find

__all__ = ['HOOKS', 'RESETS', 'BatchNorm', 'hooks_of', 'is_full_backward_hook',
           'script_attributes', 'tree_flatten', 'tree_flatten_with_path', 'tree_leaves',
           'tree_map_only', 'tree_unflatten']

# PyTorch has no public module for them, and no other functions know the classes that are
# registered with these.

_USE_OF_TREES = 'a value that is no tensor, or a context variable,'
tree_flatten: Any = find('torch.utils._pytree:tree_flatten', _USE_OF_TREES)
tree_flatten_with_path: Any = find('torch.utils._pytree:tree_flatten_with_path', _USE_OF_TREES)
tree_leaves: Any = find('torch.utils._pytree:tree_leaves', _USE_OF_TREES)
tree_map_only: Any = find('torch.utils._pytree:tree_map_only', _USE_OF_TREES)
tree_unflatten: Any = find('torch.utils._pytree:tree_unflatten', _USE_OF_TREES)


#: How a module is asked to set the initial values of its tensors. ``nn.MultiheadAttention`` and
#: ``nn.Transformer`` have no public way.
RESETS = ('reset_parameters', '_reset_parameters')

# What all of `nn.BatchNorm1d`, `2d` and `3d` derive from, with the code that they share.
if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
else:
    BatchNorm = torch.nn.BatchNorm1d.__base__


def script_attributes(module: Any) -> list[str]:
    """Name the attributes of a module of TorchScript, which are not Python's."""
    concrete = getattr(module, '_concrete_type', None)  # not of one that was loaded
    names = [] if concrete is None else concrete.get_attributes()
    return [name for name in names if name not in ('training', is_full_backward_hook)]


#: Where a module has its forward hooks, and those that its call makes nodes in the graph of.
HOOKS = ('_forward_hooks', '_forward_hooks_with_kwargs', '_forward_hooks_always_called',
         '_forward_pre_hooks', '_forward_pre_hooks_with_kwargs', '_backward_hooks',
         '_backward_pre_hooks')


#: Return the hooks that a call of a module calls: if any is not empty, it has some.
hooks_of: Callable[[torch.nn.Module], tuple[Any, ...]] = attrgetter(*HOOKS)


#: The attribute in which a module keeps whether its backward hooks are full ones.
is_full_backward_hook = '_is_full_backward_hook'
