"""Named layers and models. Each trains in a pipeline as it does unwrapped, whatever the options.

``tests/test_equivalence.py`` trains all of them; other tests use some for their own purposes.
"""

from tests.zoo.computing import COMPUTING
from tests.zoo.kept import KEPT
from tests.zoo.nested import NESTED
from tests.zoo.stateful import STATEFUL

#: All layers by name.
LAYERS = {**COMPUTING, **NESTED, **STATEFUL, **KEPT}
