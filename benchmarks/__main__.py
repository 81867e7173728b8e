"""The command line of the benchmarks."""

import sys
from typing import NoReturn

import click

from benchmarks.commands import MODULES
from benchmarks.harness.listing import listing
from benchmarks.harness.page import page
from torchgpipe.trainer.launch import accept_any_text
from torchgpipe.trainer.train_gpt import train_gpt


@click.group(context_settings={'help_option_names': ['-h', '--help']})
def cli() -> None:
    """Train a GPT with torchgpipe on any mesh, and measure it on this machine."""


for command in (
    train_gpt,
    listing,
    page,
    *(command for module in MODULES for command in module.COMMANDS),
):
    cli.add_command(command)


def main() -> NoReturn:
    """Run a command. Errors in its options take one line."""
    accept_any_text()
    try:
        cli(prog_name='python -m benchmarks', standalone_mode=False, obj=MODULES)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        click.echo(f'Error: {error.format_message()}', err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo('Stopped.', err=True)
        sys.exit(130)
    sys.exit(0)


if __name__ == '__main__':
    main()
