"""Folders of images: layout, crops, colours, and errors that name the culprit."""

import click
import pytest
import torch
from PIL import Image

from benchmarks.experiments.accuracy.images import (
    ImageFolder,
    UnreadableImage,
    centre_crop,
    normalise,
    open_folders,
    random_crop,
    write_pictures,
)


def save(path, size=(40, 30), color=(255, 0, 0)):
    """Write an image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new('RGB', size, color).save(path)


def test_classes_and_samples(tmp_path):
    save(tmp_path / 'train/b/1.png')
    save(tmp_path / 'train/a/2.JPG')
    save(tmp_path / 'train/a/1.jpeg')
    save(tmp_path / 'val/b/1.png', color=(0, 255, 0))
    (tmp_path / 'train/a/notes.txt').write_text('not an image')
    train, val = open_folders(tmp_path, 32, seed=0)
    assert train.classes == val.classes == ['a', 'b']
    assert [(path.name, k) for path, k in train.samples] == [
        ('1.jpeg', 0),
        ('2.JPG', 0),
        ('1.png', 1),
    ]
    image, label = val[0]
    assert image.shape == (3, 32, 32) and image.dtype == torch.uint8 and label == 1
    assert image[:, 5, 5].tolist() == [0, 255, 0]


def test_modes_other_than_rgb_are_converted(tmp_path):
    for mode in ('L', 'P', 'RGBA', 'CMYK'):
        path = tmp_path / mode / ('x.jpg' if mode == 'CMYK' else 'x.png')
        path.parent.mkdir()
        Image.new(mode, (20, 20)).save(path)
    assert all(image.shape == (3, 8, 8) for image, _ in ImageFolder(tmp_path, 8, seed=0))


@pytest.mark.slow
def test_crops_depend_on_seed_epoch_and_index_only(tmp_path):
    write_pictures(tmp_path, train=1, val=0)
    folder = ImageFolder(tmp_path / 'train', 32, seed=1)
    first, again = folder[0][0], folder[0][0]
    torch.manual_seed(7)
    assert torch.equal(first, again) and torch.equal(first, folder[0][0])
    folder.epoch = 1
    assert not torch.equal(first, folder[0][0])
    assert not torch.equal(first, ImageFolder(tmp_path / 'train', 32, seed=2)[0][0])


def test_random_crops_are_within_the_image_and_vary():
    random = torch.Generator().manual_seed(0)
    for width, height in ((500, 375), (30, 200), (400, 3), (1, 1)):
        boxes = {random_crop(width, height, random) for _ in range(200)}
        for left, top, right, bottom in boxes:
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
        if (width, height) == (500, 375):
            sides = [(right - left, bottom - top) for left, top, right, bottom in boxes]
            areas = [w * h / width / height for w, h in sides]
            ratios = [w / h for w, h in sides]
            assert len(boxes) > 190 and min(areas) < 0.15 and max(areas) > 0.8
            assert 0.74 < min(ratios) < 0.8 and 1.2 < max(ratios) < 1.35


def test_the_centre():
    assert centre_crop(256, 512) == (16, 144, 240, 368)


def test_a_mirrored_image_is_mirrored(tmp_path):
    image = Image.new('RGB', (64, 64))
    image.paste((255, 255, 255), (0, 0, 32, 64))
    (tmp_path / 'a').mkdir()
    image.save(tmp_path / 'a/x.png')
    folder = ImageFolder(tmp_path, 16, seed=0)
    brighter_left = set()
    for folder.epoch in range(30):
        pixels = folder[0][0].float()
        brighter_left.add((pixels[:, :, 0].mean() - pixels[:, :, -1].mean()).sign().item())
    assert brighter_left >= {1.0, -1.0}


def test_colours_are_normalised():
    image = torch.tensor([123.675, 116.28, 103.53]).round().view(1, 3, 1, 1)
    assert normalise(image.byte(), torch.double).abs().max() < 0.02
    white = normalise(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8), torch.float)
    assert white.flatten().tolist() == pytest.approx([2.2489, 2.4286, 2.64], abs=1e-4)


def test_folders_that_are_not_laid_out_like_that(tmp_path):
    with pytest.raises(click.ClickException, match='train/<class>'):
        open_folders(tmp_path, 8, 0)
    (tmp_path / 'train').mkdir()
    with pytest.raises(click.ClickException, match='no images'):
        open_folders(tmp_path, 8, 0)
    save(tmp_path / 'train/a/1.png')
    with pytest.raises(click.ClickException, match="there is no folder '.*val'"):
        open_folders(tmp_path, 8, 0)
    save(tmp_path / 'val/z/1.png')
    with pytest.raises(click.ClickException, match="do not have: 'z'"):
        open_folders(tmp_path, 8, 0)


def test_an_unreadable_image_is_named(tmp_path):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a/broken.png').write_bytes(b'nothing')
    with pytest.raises(UnreadableImage, match='broken.png'):
        ImageFolder(tmp_path, 8)[0]
