"""Transformers of the benchmarks: published sizes, and one model in each of its forms."""

import copy
import math
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.benchmarks.models import gptj, vit
from tests.helpers import assert_same, gradients
from tests.sequential import transformers as written
from tests.shard.processes import run
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.sequential import original_names
from torchgpipe.trainer import gpt
from torchgpipe.trainer.attention import heads_of


@pytest.mark.slow
def test_sizes():
    for make, parameters in (
        (lambda: gpt.GPT(gpt.GPT2['gpt2']), 124_439_808),
        (lambda: gpt.GPT(gpt.GPT2['gpt2-medium']), 354_823_168),
        (lambda: gpt.GPT(gpt.GPT2['gpt2-large']), 774_030_080),
        (lambda: gpt.GPT(gpt.GPT2['gpt2-xl']), 1_557_611_200),
        (lambda: vit.ViT(vit.VIT['ViT-B/16']), 86_567_656),
        (lambda: vit.ViT(vit.VIT['ViT-L/16']), 304_326_632),
        (gptj.GPTJ, 6_050_882_784),
    ):
        with torch.device('meta'):
            model = make()
        layers = {gpt.GPT: gpt, vit.ViT: vit, gptj.GPTJ: gptj}[type(model)].layers(model)
        for module in (model, layers):
            assert sum(p.numel() for p in module.parameters()) == parameters


def test_sizes_of_mingpt():
    """It is GPT-2 with a head of its own, 12 width² and some vectors for each block."""
    for name, sizes in gpt.MINGPT.items():
        with torch.device('meta'):
            model = gpt.GPT(sizes)
        width = sizes.width
        block = 12 * width**2 + 13 * width
        assert sum(p.numel() for p in model.parameters()) == (
            sizes.depth * block + (2 * sizes.vocabulary + sizes.context + 2) * width
        ), name
        assert width % sizes.heads == 0


GPT = gpt.Sizes(vocabulary=13, context=6, width=8, heads=2, depth=3)
GPTJ = gptj.Sizes(vocabulary=13, width=24, heads=2, depth=3, rotary=8)
VIT = vit.Sizes(width=8, heads=2, depth=3, classes=5, image=12, patch=4)

#: Each with its module, and functions that make its model and an input of some samples.
KINDS = {
    'GPT-2': (gpt, lambda: gpt.GPT(GPT), lambda n: torch.randint(13, (n, 6))),
    'minGPT': (
        gpt,
        lambda: gpt.GPT(GPT._replace(tied=False)),
        lambda n: torch.randint(13, (n, 5)),
    ),
    'GPT-J': (gptj, lambda: gptj.GPTJ(GPTJ), lambda n: torch.randint(13, (n, 6))),
    'ViT': (vit, lambda: vit.ViT(VIT), lambda n: torch.randn(n, 3, 12, 12).double()),
}

kinds = pytest.mark.parametrize('kind', KINDS)


def randomly(model):
    """Let no parameter have a value that hides another, as zeros and ones of norms do."""
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    return model.double()


def made(kind):
    """Return the module of a kind, a model, and a function that makes an input."""
    torch.manual_seed(0)
    module, make, samples = KINDS[kind]
    return module, randomly(make()), samples


def loss_of(output, target):
    """Return a mean over samples, of an output that may be split by its last dimension."""
    if isinstance(output, DTensor):
        output = output.full_tensor()
    return (output - target).square().mean()


@kinds
@pytest.mark.parametrize('balance, by', [([1, 2, 2], 'call'), ([2, 3], '1f1b')])
def test_layers_in_a_pipeline(kind, balance, by):
    """They give the numbers of the model, and learn the same, tied weights included."""
    module, model, samples = made(kind)
    layers = module.layers(copy.deepcopy(model))
    pipe = GPipe(layers, balance, devices=[f'cpu:{j}' for j in range(len(balance))], chunks=3)
    steps = [torch.optim.SGD(each.parameters(), 0.01) for each in (model, pipe)]
    for n in (7, 4):
        x = samples(n)
        target = torch.randn_like(model(x))
        expected = loss_of(model(x), target)
        expected.backward()
        if by == 'call':
            actual = loss_of(pipe(x), target)
            actual.backward()
        else:
            actual = pipe.step(x, target, loss_of, schedule=by)
        names = dict(zip([name for name, _ in model.named_parameters()], gradients(model)))
        found = original_names({name: p.grad for name, p in pipe.named_parameters()})
        assert_same(
            [actual.detach(), *(found[name] for name in names)],
            [expected.detach(), *names.values()],
        )
        for step in steps:
            step.step()
            step.zero_grad()
    model.eval()
    pipe.eval()
    assert_same([pipe(x)], [model(x)])


def test_layers_made_without_memory():
    """They have the initial values of the model, in the mean: small ones in embeddings."""
    for module, make, _ in KINDS.values():
        torch.manual_seed(0)
        with torch.device('meta'):
            layers = module.layers(make())
        pipe = GPipe(layers, [2, 3], devices=['cpu'] * 2)
        parameters = original_names(dict(pipe.named_parameters()))
        for name, x in make().named_parameters():
            spread = parameters[name].std().item()
            assert x.dim() < 2 or spread == pytest.approx(x.std().item(), rel=0.6), name
            if name.endswith(('wte.weight', 'wpe.weight', 'cls_token', 'pos_embed')):
                assert 0.01 < spread < 0.04, name


def batches(samples, shape):
    """Return two mini-batches with their targets, the same ones on each rank."""
    torch.manual_seed(1)
    return [(samples(n), torch.randn(n, *shape).double()) for n in (4, 3)]


def split(kind, axes):
    """Train on a rank; return losses, norms of gradients, and parameters."""
    module, model, samples = made(kind)
    shape = model(samples(1)).shape[1:]
    balance = [3, 2] if 'pipe' in axes else [5]
    pipe = DistributedGPipe(
        module.layers(model),
        balance,
        mesh=init_mesh(**axes),
        chunks=2,
        tensor_plan=module.tensor_plan(),
    )
    optimizer = torch.optim.SGD(pipe.parameters(), 0.05)
    found = []
    for x, target in batches(samples, shape):
        found += [pipe.step(x, target, loss_of).item(), pipe.clip_grad_norm_(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    parameters = {
        name: x.full_tensor() if hasattr(x, 'full_tensor') else x
        for name, x in pipe.named_parameters(remove_duplicate=False)
    }
    return found, {name: x.detach() for name, x in original_names(parameters).items()}


def whole(kind):
    """Return the same of the model in one process."""
    _, model, samples = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for x, target in batches(samples, model(samples(1)).shape[1:]):
        loss = loss_of(model(x), target)
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    'kind, axes',
    [
        ('GPT-2', {'tensor': 2, 'pipe': 2}),
        ('minGPT', {'tensor': 2}),
        ('GPT-J', {'tensor': 2}),
        ('ViT', {'tensor': 2, 'pipe': 2}),
    ],
)
def test_plan(kind, axes):
    """A vocabulary and classes that 2 does not divide, and tied weights, are split as well."""
    expected, parameters = whole(kind)
    seen = set()
    for found, here in run(math.prod(axes.values()), split, kind, axes):
        assert found == pytest.approx(expected, rel=1e-10)
        seen |= here.keys()
        assert_same(here.values(), [parameters[name].detach() for name in here], 1e-10)
    assert seen == parameters.keys()


def test_plan_is_about_all_that_is_large():
    for kind in KINDS:
        module, model, _ = made(kind)
        plan = module.tensor_plan()
        left = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, (nn.Linear, nn.Embedding))
            and not any(fnmatchcase(name, x) for x in plan)
        ]
        assert left == (['transformer.wpe'] if module is gpt else []), kind


def test_heads_that_do_not_divide_by_the_ranks():
    assert heads_of(torch.zeros(1, 24), 3, 4).shape == (1, 2, 3, 4)
    with pytest.raises(ValueError, match=r'18 features are 1.50 heads of 12.* whole ones'):
        heads_of(torch.zeros(1, 18), 3, 4)


def piped(module, make, weights):
    """Return the layers of a model, made without memory, with weights by the model's names."""
    with torch.device('meta'):
        layers = module.layers(make().double())
    return GPipe(layers, [2, 3], devices=['cpu'] * 2, chunks=2, weights=weights)


def test_gpt_against_one_with_weights_the_other_way_round():
    torch.manual_seed(0)
    reference = randomly(written.GPT(written.GPTConfig(13, 6, 8, 3, 2, dropout=0.0)))
    tokens = torch.randint(13, (4, 5))
    pipe = piped(gpt, KINDS['GPT-2'][1], gpt.from_hugging_face(reference.state_dict(), 2))
    assert_same([pipe(tokens)], [reference(tokens).logits])


def test_vit_against_one_with_weights_in_another_order():
    torch.manual_seed(0)
    reference = randomly(written.VisionTransformer(12, 4, 8, depth=3, num_heads=2, num_classes=5))
    images = torch.randn(4, 3, 12, 12).double()
    pipe = piped(vit, KINDS['ViT'][1], vit.from_timm(reference.state_dict(), 2))
    assert_same([pipe(images)], [reference(images)])


@pytest.mark.tools
def test_gpt_against_transformers():
    transformers = pytest.importorskip('transformers', reason="pip install -e '.[tools]'")
    torch.manual_seed(0)
    reference = randomly(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=3, n_head=2)
        )
    ).eval()
    tokens = torch.randint(13, (4, 6))
    pipe = piped(gpt, KINDS['GPT-2'][1], gpt.from_hugging_face(reference.state_dict(), 2))
    assert_same([pipe(tokens)], [reference(tokens).logits])


@pytest.mark.tools
def test_gptj_against_transformers():
    """That computes scores of attention in float32, always."""
    transformers = pytest.importorskip('transformers', reason="pip install -e '.[tools]'")
    torch.manual_seed(0)
    reference = randomly(
        transformers.GPTJForCausalLM(
            transformers.GPTJConfig(
                vocab_size=13, n_positions=6, n_embd=24, n_layer=3, n_head=2, rotary_dim=8
            )
        )
    ).eval()
    tokens = torch.randint(13, (4, 6))
    pipe = piped(gptj, KINDS['GPT-J'][1], reference.state_dict())
    assert_same([pipe(tokens)], [reference(tokens).logits], 1e-5)


def test_positions_turn_pairs_of_features():
    """As complex numbers, of which those behind the first eight features stay as they are."""
    x = torch.randn(2, 5, 3, 12).double()
    angles = torch.arange(5.0).double()[:, None, None] * 10000 ** (-torch.arange(4.0).double() / 4)
    pairs = torch.view_as_complex(x[..., :8].unflatten(-1, (-1, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    assert_same([gptj.turned(x, 8)], [torch.cat([expected.flatten(-2), x[..., 8:]], -1)])


def test_positions_are_exact_in_half_precision():
    x = torch.ones(1, 1000, 1, 8, dtype=torch.bfloat16)
    assert_same([gptj.turned(x, 8).float()], [gptj.turned(x.float(), 8)], 0.01)
