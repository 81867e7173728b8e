"""Write a small folder of real images, to try the accuracy experiment on.

The classes are crops of scikit-learn's two photographs, and some of its handwritten digits.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy
from PIL import Image

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
