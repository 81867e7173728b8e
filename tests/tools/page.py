"""What the page of tools shows: a model that recipes share, and recipes by what they need."""
import re
from pathlib import Path

__all__ = ['MODEL', 'PAGE', 'RECIPES']

PAGE = (Path(__file__).parents[2] / 'docs/guide/tools.md').read_text()

MODEL = re.search(r'^```python\n(.*?)^```$', PAGE, re.M | re.S)[1]

RECIPES = {}
for package, code in re.findall(r'^```py\n# needs (\w+)\n(.*?)^```$', PAGE, re.M | re.S):
    RECIPES.setdefault(package, []).append(code)
