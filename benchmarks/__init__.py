"""Benchmarks: ``python -m benchmarks --help``.

::

    commands      the list of experiments: where a new one is added
    experiments   the measurements: a module each
    harness       code that they share:
                  published   the tables of torchgpipe 0.0.7 and the GPipe paper
                  experiment  their settings and figures
                  options     the user's options, and the simulated accelerator
                  job         the training of one setting
                  memory      the memory of a step, and its exhaustion
                  campaign    settings one after another
                  tables      their rows, notes and bars
                  timing      contenders in turn
                  report      output, files and pages of results
                  charts      pictures
                  page        the page of the results; costs is another one
                  listing     the list of commands
                  hosts       hosts in one, with a slow link
    models        models of the published tables, and stacks of equal layers
    results       stored measurements
"""

try:
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f'the benchmarks need the package {error.name!r}, the library does not; '
        "in the clone, run: pip install -e '.[benchmarks]' -c constraints.txt",
        name=error.name,
    ) from error

# No thread beside those that are measured.
tqdm.monitor_interval = 0
