"""A trainer of GPTs, as a command: ``torchgpipe-train-gpt``."""

try:
    import click  # noqa: F401
    import tqdm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f'the trainer needs the package {error.name!r}, the library does not: '
        "pip install 'torchgpipe[train]'",
        name=error.name,
    ) from error
