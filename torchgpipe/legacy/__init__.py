"""Names that code for the internals of torchgpipe 0.0.7 imports; the engine does not use them.

Some of it stands elsewhere in the engine under the same names; these modules can be imported by
their old paths as well.
"""
import sys
from importlib import import_module

#: Old paths within this package, and where what they had is now.
PATHS = {'checkpoint': 'legacy.checkpoint', 'copy': 'engine.copy',
         'dependency': 'engine.dependency', 'microbatch': 'legacy.microbatch',
         'phony': 'engine.dependency', 'pipeline': 'legacy.pipeline',
         'skip.portal': 'legacy.portal', 'stream': 'engine.stream', 'worker': 'legacy.pipeline'}

for _old, _new in PATHS.items():
    _module = import_module(f'torchgpipe.{_new}')
    sys.modules[f'torchgpipe.{_old}'] = _module
    _package, _, _name = f'torchgpipe.{_old}'.rpartition('.')
    setattr(sys.modules[_package], _name, _module)

_module = import_module('torchgpipe.legacy.portal')
for _name in _module.__all__:  # beside the trackers that the engine uses
    setattr(sys.modules['torchgpipe.skip.tracker'], _name, getattr(_module, _name))
