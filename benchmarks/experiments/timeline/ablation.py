"""Switch off torchgpipe's features for speed and memory, to measure the effect of each.

==============  ============================================================================
off             instead
==============  ============================================================================
``dependency``  no edge keeps the order of micro-batches in backward
``streams``     copies wait in the stream of the computation
``portals``     skips are carried through every partition
                (:mod:`benchmarks.experiments.timeline.carry`)
==============  ============================================================================

The results of the model stay the same.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.streams import current_stream


@contextmanager
def without(off: Collection[str]) -> Iterator[None]:
    """Switch off, within the context, the features that do not require a change of the model."""
    with ExitStack() as stack:
        if 'dependency' in off:
            never = property(lambda self: False, lambda self, value: None)
            stack.enter_context(patch.object(PlainCall, '_orders', never, create=True))
        if 'streams' in off:
            stack.enter_context(patch('torchgpipe.engine.workers.new_stream', current_stream))
        yield
