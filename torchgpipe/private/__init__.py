"""Private names of PyTorch that this package needs, each with its reason.

Nothing else in the package uses a private name of PyTorch's, and importing this never fails: each
name is looked up by :func:`torchgpipe.private.lookup.find`. Where a release does not have it,
something public takes its place, slower; or what needs it raises when it is used, and says so.
``tests/test_private.py`` uses each of these by itself, and takes away one after the other;
``docs/private-names.md`` says where each lives in PyTorch.
"""
from torchgpipe.private.compiled import (APPLY, compiled_code, compiled_codes, is_compiled,
                                         is_compiled_module, name_of_call, own_context, uncompiled,
                                         untraced)
from torchgpipe.private.graph import (Hooks, PythonNode, at_end_of_backward, backward_pass,
                                      current_node, data_address, innermost_hooks, lazy_clone,
                                      on_cpu_without_memory, retains_graph)
from torchgpipe.private.lookup import TESTED
from torchgpipe.private.modes import (DISPATCH_MODES, FUNCTION_MODES, DeviceContext, DispatchMode,
                                      ModeStack, allows_mutation, is_transformed, proxy_mode,
                                      schema_of, unseen)
from torchgpipe.private.modules import (HOOKS, RESETS, BatchNorm, hooks_of, is_full_backward_hook,
                                        script_attributes, tree_flatten, tree_flatten_with_path,
                                        tree_leaves, tree_map_only, tree_unflatten)
from torchgpipe.private.processes import Scaler, active_ddp, ignore_in_ddp

__all__ = ['TESTED', 'APPLY', 'DISPATCH_MODES', 'FUNCTION_MODES', 'HOOKS', 'RESETS', 'BatchNorm',
           'DeviceContext', 'DispatchMode', 'Hooks', 'ModeStack', 'PythonNode', 'Scaler',
           'active_ddp', 'allows_mutation', 'at_end_of_backward', 'backward_pass', 'compiled_code',
           'compiled_codes', 'current_node', 'data_address', 'hooks_of', 'ignore_in_ddp',
           'innermost_hooks', 'is_compiled', 'is_compiled_module', 'is_full_backward_hook',
           'is_transformed', 'lazy_clone', 'name_of_call', 'on_cpu_without_memory', 'own_context',
           'proxy_mode', 'retains_graph', 'schema_of', 'script_attributes', 'tree_flatten',
           'tree_flatten_with_path', 'tree_leaves', 'tree_map_only', 'tree_unflatten',
           'uncompiled', 'unseen', 'untraced']
