"""The published tables: settings and figures, by experiment.

Figures of torchgpipe 0.0.7 were measured on Tesla P40, 22 GiB each. The GPipe paper is Huang et
al., arXiv 1811.06965v4. Its speeds, and the speeds in torchgpipe's first README, were given as
ratios. So their unit is their own baseline. Memory is in GiB, except in the GPipe paper, which
uses GB.
"""

from collections.abc import Sequence

from benchmarks.harness.experiment import OURS, Experiment, Model, Setting

PAPER = 'GPipe paper'
FIRST = 'first README'
GOYAL = 'Goyal et al.'

RESNET = Model('resnet101')

RESNET_8 = (26, 22, 33, 44, 44, 66, 66, 69)


def _figures(
    *figures: float | None, sources: Sequence[str] = (OURS, PAPER, FIRST)
) -> dict[str, float | None]:
    return dict(zip(sources, figures))


RESNET_SPEED = Experiment(
    'resnet101-speed',
    'Speed of ResNet-101',
    'throughput',
    'samples/s',
    224,
    (
        Setting('baseline', RESNET, 118, published=_figures(95.862, 1, 1)),
        Setting('pipeline-1', RESNET, 220, 2, (370,), published=_figures(81.796, 0.80, 0.74)),
        Setting(
            'pipeline-2', RESNET, 25000, 1667, (135, 235), published=_figures(135.539, 1.42, 1.352)
        ),
        Setting(
            'pipeline-4',
            RESNET,
            5632,
            256,
            (44, 92, 124, 110),
            published=_figures(265.958, 2.18, 2.181),
        ),
        Setting(
            'pipeline-8', RESNET, 5400, 150, RESNET_8, published=_figures(411.662, 2.89, 2.808)
        ),
    ),
)


def _amoebanetd(
    n: int, m: int, batch: int, balance: tuple[int, ...], ours: float, paper: float
) -> Setting:
    return Setting(
        f'n{n}m{m}',
        Model('amoebanetd', (18, 256)),
        batch,
        m,
        balance,
        'always' if m == 1 else 'except_last',
        _figures(ours, paper),
    )


AMOEBANETD_SPEED = Experiment(
    'amoebanetd-speed',
    'Speed of AmoebaNet-D',
    'throughput',
    'samples/s',
    224,
    (
        _amoebanetd(2, 1, 96, (7, 17), 26.733, 1),
        _amoebanetd(2, 4, 256, (9, 15), 41.133, 1.07),
        _amoebanetd(2, 32, 1280, (9, 15), 47.386, 1.21),
        _amoebanetd(4, 1, 160, (3, 4, 5, 12), 26.827, 1.13),
        _amoebanetd(4, 4, 360, (3, 6, 7, 8), 44.543, 1.26),
        _amoebanetd(4, 32, 1152, (3, 6, 7, 8), 72.412, 1.84),
        _amoebanetd(8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918, 1.38),
        _amoebanetd(8, 4, 480, (2, 2, 2, 3, 3, 4, 4, 4), 70.065, 1.72),
        _amoebanetd(8, 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4), 132.413, 3.48),
    ),
)

UNET_5_64 = Model('unet', (5, 64))

UNET_SPEED = Experiment(
    'unet-speed',
    'Speed of U-Net',
    'throughput',
    'samples/s',
    192,
    (
        Setting('baseline', UNET_5_64, 40, published=_figures(28.500)),
        Setting('pipeline-1', UNET_5_64, 80, 2, (241,), published=_figures(24.456)),
        Setting('pipeline-2', UNET_5_64, 512, 32, (104, 137), published=_figures(35.502)),
        Setting('pipeline-4', UNET_5_64, 512, 16, (30, 66, 84, 61), published=_figures(67.042)),
        Setting(
            'pipeline-8',
            UNET_5_64,
            640,
            40,
            (16, 27, 31, 44, 22, 57, 27, 17),
            published=_figures(88.497),
        ),
    ),
)


MODEL = 'model, GiB'
ACTIVATIONS = 'activations, GiB'


def _memory(
    name: str,
    size: tuple[int, int],
    balance: tuple[int, ...],
    ours: tuple[float, float | None],
    paper: tuple[float, float],
) -> Setting:
    totals = [
        None if activations is None else model + activations
        for model, activations in (ours, paper)
    ]
    return Setting(
        name,
        Model('amoebanetd', size),
        128,
        128 if balance else 1,
        balance,
        published=_figures(*totals),
        details={MODEL: _figures(ours[0], paper[0]), ACTIVATIONS: _figures(ours[1], paper[1])},
    )


AMOEBANETD_MEMORY = Experiment(
    'amoebanetd-memory',
    'Memory of AmoebaNet-D with RMSprop',
    'memory',
    'GiB',
    224,
    (
        _memory('baseline', (18, 208), (), (0.91, None), (1.05, 6.26)),
        _memory('pipeline-1', (18, 416), (24,), (3.57, 0.91), (3.8, 3.46)),
        _memory('pipeline-2', (18, 544), (16, 8), (6.07, 3.39), (6.45, 8.11)),
        _memory('pipeline-4', (36, 544), (16, 12, 7, 7), (11.80, 6.91), (12.53, 15.21)),
        _memory(
            'pipeline-8', (72, 512), (23, 16, 11, 6, 6, 5, 5, 6), (20.62, 10.83), (24.62, 26.24)
        ),
    ),
    'RMSprop',
)

UNET_MEMORY = Experiment(
    'unet-memory',
    'Memory of U-Net with SGD',
    'memory',
    'GiB',
    192,
    (
        Setting('baseline', Model('unet', (6, 72)), 32, published=_figures(20.3)),
        Setting('pipeline-1', Model('unet', (11, 128)), 32, 32, (505,), published=_figures(20.5)),
        Setting(
            'pipeline-2', Model('unet', (24, 128)), 32, 32, (526, 551), published=_figures(43.4)
        ),
        Setting(
            'pipeline-4',
            Model('unet', (24, 160)),
            32,
            32,
            (472, 54, 36, 515),
            published=_figures(79.1),
        ),
        Setting(
            'pipeline-8',
            Model('unet', (48, 160)),
            32,
            128,
            (800, 140, 62, 36, 36, 36, 36, 987),
            published=_figures(154.1),
        ),
    ),
)


UTILISATION = 'utilisation, %'
MEMORY = 'memory, GiB'


def _ablation(
    name: str, off: tuple[str, ...], ours: float, utilisation: float, memory: float
) -> Setting:
    return Setting(
        name,
        UNET_5_64,
        128,
        8,
        (34, 76, 70, 61),
        published=_figures(ours),
        off=off,
        details={UTILISATION: _figures(utilisation), MEMORY: _figures(memory)},
    )


UNET_TIMELINE = Experiment(
    'unet-timeline',
    'Effect of dependency, streams and portals on U-Net',
    'throughput',
    'samples/s',
    192,
    (
        _ablation('nothing', ('dependency', 'streams', 'portals'), 30.662, 44, 52.2),
        _ablation('dependency', ('streams', 'portals'), 41.306, 59, 19.1),
        _ablation('streams', ('portals',), 55.191, 71, 30.0),
        _ablation('portals', (), 58.477, 75, 23.5),
    ),
)

RESNET_ACCURACY = Experiment(
    'resnet101-accuracy',
    'Top-1 error of ResNet-101 on ImageNet',
    'error',
    '%',
    224,
    (
        # Published: data parallel, which is not GPipe either.
        Setting(
            'baseline',
            RESNET,
            256,
            published=_figures(22.02, 22.08, sources=(OURS, GOYAL)),
            spread={OURS: 0.11, GOYAL: 0.06},
        ),
        Setting(
            'pipeline-256',
            RESNET,
            256,
            4,
            (140, 230),
            published=_figures(21.99),
            spread={OURS: 0.13},
        ),
        # No balance was published for eight devices; this is the one of the speed table.
        Setting(
            'pipeline-1k',
            RESNET,
            1024,
            64,
            RESNET_8,
            published=_figures(22.24),
            spread={OURS: 0.19},
        ),
        Setting(
            'pipeline-4k',
            RESNET,
            4096,
            64,
            RESNET_8,
            published=_figures(22.13),
            spread={OURS: 0.09},
        ),
    ),
)

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        RESNET_ACCURACY,
        RESNET_SPEED,
        AMOEBANETD_SPEED,
        AMOEBANETD_MEMORY,
        UNET_SPEED,
        UNET_MEMORY,
        UNET_TIMELINE,
    )
}
