"""Outputs of a training: a CSV log, and a checkpoint to resume from."""

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.options import Options
from torchgpipe.trainer.files import replacing


def _folder(experiment: Experiment, setting: Setting, options: Options) -> Path:
    return Path(options.output) / f'{experiment.name}-{setting.name}'


def refuse_to_overwrite(experiment: Experiment, options: Options) -> None:
    """Raise :exc:`click.ClickException` if the output folder holds a training already."""
    for setting in options.settings:
        path = _folder(experiment, setting, options) / 'checkpoint.pt'
        if path.exists():
            raise click.ClickException(
                f"there is a checkpoint already, '{path}'; --resume goes "
                'on from it, another --output starts anew'
            )


@dataclass
class Progress:
    """The rows of the log, and where they are kept with the state of the training.

    Attributes:
        folder: The folder of both files.
        recipe: The settings of the training. A checkpoint of another recipe is refused.
        rows: A row per epoch.
    """

    folder: Path
    recipe: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begin(
        cls, experiment: Experiment, setting: Setting, options: Options, classes: list[str]
    ) -> 'Progress':
        """Start in the folder of a setting."""
        folder = _folder(experiment, setting, options)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = {
            'batch': setting.scaled_batch(options.scale),
            'epochs': options.epochs,
            'resolution': experiment.scaled_resolution(options.scale),
            'seed': options.seed,
            'dtype': str(options.dtype),
            'classes': classes,
        }
        return cls(folder, recipe)

    @property
    def checkpoint(self) -> Path:
        """The file with the state."""
        return self.folder / 'checkpoint.pt'

    def add(self, row: dict[str, Any], **state: Any) -> None:
        """Keep an epoch; an interruption leaves either the old files or the new ones."""
        self.rows.append(row)
        with replacing(self.folder / 'log.csv') as path, path.open('w', newline='') as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerows(self.rows)
        checkpoint = {'recipe': self.recipe, 'rows': self.rows}
        for name, value in state.items():
            checkpoint[name] = value.state_dict()
        with replacing(self.checkpoint) as path:
            torch.save(checkpoint, path)

    def resume(self, **state: Any) -> None:
        """Load the last epoch, if there is one."""
        if not self.checkpoint.exists():
            return
        kept = torch.load(self.checkpoint, map_location='cpu', weights_only=True)
        for name, value in self.recipe.items():
            if kept['recipe'][name] != value:
                raise click.ClickException(
                    f"'{self.checkpoint}' comes from a training with another {name}: "
                    f'{kept["recipe"][name]}, not {value}'
                )
        self.rows = kept['rows']
        for name, value in state.items():
            value.load_state_dict(kept[name])
