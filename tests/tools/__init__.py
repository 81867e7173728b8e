"""Tools around a ``GPipe``: one test for each row of the table in ``docs/guide/tools.md``."""
