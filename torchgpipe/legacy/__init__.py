"""Old paths: names that code for torchgpipe 0.0.7 imports, and modules in pickles of old versions.

Some of them are elsewhere in the engine under the same names; these modules can also be imported
by their old paths. No module is loaded before it is used.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Paths of 0.0.7, and the modules that have their names now.
OF_007 = {
    'balance.blockpartition': 'plan.balance',
    'balance.profile': 'plan.profile',
    'checkpoint': 'legacy.checkpointing',
    'copy': 'engine.backward_order',
    'dependency': 'engine.backward_order',
    'microbatch': 'legacy.pipeline',
    'phony': 'engine.backward_order',
    'pipeline': 'legacy.pipeline',
    'skip.namespace': 'skip.transfer',
    'skip.portal': 'legacy.portal',
    'skip.tracker': 'skip.transfer',
    'stream': 'engine.streams',
    'worker': 'legacy.pipeline',
}

#: Paths in pickles and guides of versions before 0.17, such as a saved converted model or plan.
BEFORE_017 = {
    'balance.profiled': 'plan.balance',
    'plan.choice': 'plan.search',
    'predict': 'legacy',  # a parent for the following paths
    'predict.blocks': 'plan.costs',
    'predict.costs': 'plan.costs',
    'predict.simulate': 'plan.simulation',
    'schedule.action': 'schedule.schedule',
    'sequential.errors': 'sequential.refusals',
    'sequential.nodes': 'sequential.operations',
    'sequential.optimizers': 'sequential.parts',
    'shard.gradients': 'shard.averaging',
    'shard.nn.embedding': 'shard.nn.linear',
    'shard.nn.tag': 'shard.nn.module',
    'structure': 'base.structure',
    'timeline.lanes': 'timeline.timeline',
    'weights': 'model.weights',
}

PATHS = {f'torchgpipe.{old}': f'torchgpipe.{new}' for old, new in {**OF_007, **BEFORE_017}.items()}


class _OldPaths(MetaPathFinder, Loader):
    """Import the module that has the names of an old path now."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in PATHS else None

    def create_module(self, spec: ModuleSpec) -> None:
        pass  # an empty module, which is replaced

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(PATHS[module.__name__])


def _old_name(name: str) -> Any:
    """Return an attribute that ``torchgpipe.skip`` or ``torchgpipe.skip.tracker`` had."""
    if f'torchgpipe.skip.{name}' in PATHS:
        return import_module(f'torchgpipe.skip.{name}')
    if 'ortal' in name or name == 'SkipTrackerThroughPotals':
        return getattr(import_module('torchgpipe.skip.portal'), name)
    raise AttributeError(f'torchgpipe.skip has no {name!r}')


sys.meta_path.append(_OldPaths())
for _owner in ('torchgpipe.skip', 'torchgpipe.skip.transfer'):
    sys.modules[_owner].__dict__['__getattr__'] = _old_name
