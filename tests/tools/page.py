"""Contents of pages about tools: recipes by their packages, and a model that some share."""

import re
from pathlib import Path

_GUIDE = Path(__file__).parents[2] / 'docs/guide'

PAGE = (_GUIDE / 'tools.md').read_text()


def _blocks(page):
    """Return the code of a page, each with the package that it needs."""
    return re.findall(r'^```py\n# needs (\w+)\n(.*?)^```$', page, re.M | re.S)


MODEL = re.search(r'^```python\n(.*?)^```$', PAGE, re.M | re.S)[1]

RECIPES = {}
for _package, _code in _blocks(PAGE):
    RECIPES.setdefault(_package, []).append(_code)

#: Of the page about Hugging Face, each goes on where the one before has ended.
HUGGING_FACE = _blocks((_GUIDE / 'huggingface.md').read_text())

VISION = _blocks((_GUIDE / 'vision-language.md').read_text())
