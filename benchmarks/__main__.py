"""The command line of the benchmarks."""

from typing import NoReturn

import click

from benchmarks.commands import MODULES
from benchmarks.harness.listing import listing
from benchmarks.harness.page import page
from torchgpipe.trainer.command import run_command, train_gpt


@click.group(context_settings={'help_option_names': ['-h', '--help'], 'show_default': True})
def cli() -> None:
    """Train a GPT with torchgpipe on any mesh, and measure it on this machine."""


for command in (train_gpt, listing, page):
    cli.add_command(command)
for module in MODULES:
    for command in module.COMMANDS:
        cli.add_command(command)


def main() -> NoReturn:
    """Run a command. Errors in its options take one line."""
    run_command(cli, 'python -m benchmarks', MODULES)


if __name__ == '__main__':
    main()
