"""Images in a folder for each class, as ImageNet is laid out; cropped as its training recipe asks.

::

    DIR/train/<class>/<image>   random crop of 8 % to 100 % of the area, mirrored or not
    DIR/val/<class>/<image>     the square in the centre, 7/8 of the shorter side (224 of 256)

The command ``pictures`` writes a small folder of real images, to try the experiment on. Its
classes are crops of scikit-learn's two photographs, and some of its handwritten digits.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import click
import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

EXTENSIONS = {'.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp'}

#: Mean and standard deviation of the colours of ImageNet.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)

Crop = tuple[float, float, float, float]


class UnreadableImage(Exception):
    """An image that Pillow does not understand."""


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images of shape (3, resolution, resolution) in bytes, each with the index of its class.

    Args:
        folder: Holds a folder for each class.
        resolution: Height and width of the crops.
        seed: The seed of random crops, with ``epoch`` and the index; ``None`` for centre crops.
        classes: Names of the classes, by default the names in the folder.

    Raises:
        click.ClickException: The folder is not laid out like that.
    """

    def __init__(
        self,
        folder: Path,
        resolution: int,
        seed: int | None = None,
        classes: list[str] | None = None,
    ) -> None:
        self.resolution = resolution
        self.seed = seed
        self.epoch = 0
        if not folder.is_dir():
            raise click.ClickException(
                f'there is no folder {str(folder)!r}: images are expected '
                'in train/<class>/ and val/<class>/'
            )
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.classes = names if classes is None else classes
        unknown = sorted(set(names) - set(self.classes))
        if unknown:
            raise click.ClickException(
                f'{str(folder)!r} has a class that the training images do not have: {unknown[0]!r}'
            )
        self.samples = []
        for k, name in enumerate(self.classes):
            for path in sorted((folder / name).glob('*')):
                if path.suffix.lower() in EXTENSIONS:
                    self.samples.append((path, k))
        if not self.samples:
            raise click.ClickException(
                f'there are no images in {str(folder)!r}: they are '
                'expected in a folder for each class'
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        try:
            with Image.open(path) as file:
                image = file.convert('RGB')
        except Exception as error:  # Pillow's formats raise whatever comes to their minds.
            raise UnreadableImage(
                f'{str(path)!r} is not an image that can be read: {error}'
            ) from None
        return self._crop(image, index), label

    def _crop(self, image: Image.Image, index: int) -> Tensor:
        flip = False
        if self.seed is None:
            box = centre_crop(image.width, image.height)
        else:
            # Not from a worker's generator: crops must not depend on the number of workers.
            random = torch.Generator().manual_seed(hash((self.seed, self.epoch, index)) % 2**63)
            box = random_crop(image.width, image.height, random)
            flip = bool(torch.rand((), generator=random) < 0.5)
        size = (self.resolution, self.resolution)
        pixels = bytearray(image.resize(size, Image.Resampling.BILINEAR, box=box).tobytes())
        tensor = torch.frombuffer(pixels, dtype=torch.uint8).view(*size, 3).permute(2, 0, 1)
        return (tensor.flip(2) if flip else tensor).contiguous()


def centre_crop(width: int, height: int) -> Crop:
    """Return the square in the centre."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_crop(width: int, height: int, random: torch.Generator) -> Crop:
    """Return a box of random area and ratio (Szegedy et al., "Going deeper", 2014)."""
    for _ in range(10):
        a, b, c, d = torch.rand(4, generator=random).tolist()
        area = width * height * (AREA[0] + (AREA[1] - AREA[0]) * a)
        ratio = math.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * b)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(c * (width - w + 1)), int(d * (height - h + 1))
            return left, top, left + w, top + h
    # The image is so narrow that no box fits: as much as the ratios allow.
    w = min(width, round(height * RATIO[1])) or 1
    h = min(height, round(width / RATIO[0])) or 1
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def open_folders(data: Path, resolution: int, seed: int) -> tuple[ImageFolder, ImageFolder]:
    """Open the images for training and for validation."""
    train = ImageFolder(data / 'train', resolution, seed)
    return train, ImageFolder(data / 'val', resolution, classes=train.classes)


def normalise(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn bytes into numbers of mean 0 and deviation 1, on the device where they are."""
    mean, std = (
        torch.tensor(values, dtype=dtype, device=images.device).view(3, 1, 1) * 255
        for values in (MEAN, STD)
    )
    return (images.to(dtype) - mean) / std


SIZE = 96
DIGITS = (0, 1, 7)


def write_pictures(folder: Path, train: int = 16, val: int = 4) -> None:
    """Write ``train/<class>/`` and ``val/<class>/`` with this many images each."""
    for name, images in (*_photographs(train + val), *_digits(train + val)):
        for k, image in enumerate(images):
            path = folder / ('train' if k < train else 'val') / name / f'{k:03}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


def _photographs(number: int) -> Iterator[tuple[str, Iterator[Image.Image]]]:
    from sklearn.datasets import load_sample_image

    for name in ('china', 'flower'):
        yield name, _crops(Image.fromarray(load_sample_image(f'{name}.jpg')), number)


def _crops(photograph: Image.Image, number: int) -> Iterator[Image.Image]:
    random = numpy.random.default_rng(0)
    for _ in range(number):
        left = int(random.integers(photograph.width - 2 * SIZE))
        top = int(random.integers(photograph.height - 2 * SIZE))
        yield photograph.crop((left, top, left + 2 * SIZE, top + 2 * SIZE)).resize((SIZE, SIZE))


def _digits(number: int) -> Iterator[tuple[str, Iterator[Image.Image]]]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for digit in DIGITS:
        chosen = images[labels == digit][:number].reshape(-1, 8, 8)
        yield (
            f'digit-{digit}',
            (Image.fromarray((x / 16 * 255).astype('uint8')).resize((SIZE, SIZE)) for x in chosen),
        )
