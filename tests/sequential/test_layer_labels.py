"""Labels in the call: the loss of a language model equals the loss of the whole mini-batch."""

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.sequential import models
from tests.sequential.models import MODELS
from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import to_sequential

pytestmark = [pytest.mark.filterwarnings('ignore:output.*neither')]

WORDS, LENGTH = 13, 6


def loss_of(logits, labels, num_items_in_batch=None, **_):
    """Return the loss of transformers: a mean over the labels of the call, or over a number."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    reduction = 'mean' if num_items_in_batch is None else 'sum'
    loss = F.cross_entropy(logits.view(-1, WORDS), shifted.view(-1), reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Llama(nn.Module):
    """A decoder with rotary positions. ``kwargs`` has other arguments of its loss than labels."""

    def __init__(self, width=8, heads=2, depth=2):
        super().__init__()
        self.embed, self.heads = nn.Embedding(WORDS, width), heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    'norm': nn.RMSNorm(width),
                    'qkv': nn.Linear(width, 3 * width, bias=False),
                    'out': nn.Linear(width, width, bias=False),
                }
            )
            for _ in range(depth)
        )
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.register_buffer('inv_freq', 0.1 ** torch.arange(width // heads // 2), False)

    def rotated(self, x):
        """Rotate pairs by their place."""
        angles = torch.arange(x.shape[2], device=x.device)[:, None] * self.inv_freq
        a, b = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        B, T = input_ids.shape
        x = self.embed(input_ids)
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        mask = mask & attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            q, k, v = (
                y.view(B, T, self.heads, -1).transpose(1, 2)
                for y in layer.qkv(layer.norm(x)).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, mask)
            x = x + layer.out(y.transpose(1, 2).reshape(B, T, -1)).tanh()
        logits = self.lm_head(x)
        loss = None if labels is None else loss_of(logits, labels, **kwargs)
        return {'loss': loss, 'logits': logits}


class Bert(nn.Module):
    """An encoder, whose loss is a module that forward makes, and whose labels are not shifted."""

    def __init__(self, width=8):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.decoder = nn.Linear(width, WORDS)

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.embed(input_ids) + self.places(torch.arange(LENGTH, device=input_ids.device))
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=attention_mask == 0)
        logits, loss = self.decoder(x), None
        if labels is not None:
            loss_fct = nn.CrossEntropyLoss()
            loss = loss_fct(logits.view(-1, WORDS), labels.view(-1))
        return {'loss': loss, 'logits': logits}


class T5(models.T5):
    """A T5 whose labels are its expected output and, shifted, the input of its decoder."""

    def forward(self, input_ids, attention_mask, labels):
        logits = super().forward(input_ids, attention_mask, labels=labels).logits
        loss_fct = nn.CrossEntropyLoss(ignore_index=-100)
        return {
            'loss': loss_fct(logits.view(-1, logits.size(-1)), labels.view(-1)),
            'logits': logits,
        }


def counted(input_ids, attention_mask, labels):
    """Count labels that are not shifted."""
    return (labels != -100).sum()


def counted_shifted(input_ids, attention_mask, labels):
    """Count labels, of which the first one of each row is no target."""
    return (labels[:, 1:] != -100).sum()


#: Each with the function that counts the elements of its mean.
LANGUAGE_MODELS = {
    'GPT': (lambda: MODELS['GPT'](dropout=0.0)[0], counted_shifted),
    'Llama': (Llama, counted_shifted),
    'BERT': (Bert, counted),
    'T5': (lambda: T5(MODELS['T5'](dropout=0.0)[0].config), counted),
}
language_models = pytest.mark.parametrize('name', LANGUAGE_MODELS)


def padded(rows, seed=0):
    """Return sequences of different lengths, one of them of a single token."""
    generator = torch.manual_seed(seed)
    ids = torch.randint(1, WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
    lengths[:2, 0] = torch.tensor([LENGTH, 1])
    mask = (torch.arange(LENGTH) < lengths).long()
    return {'input_ids': ids, 'attention_mask': mask, 'labels': ids.masked_fill(mask == 0, -100)}


def make(name, **more):
    """Return a model in float64, its layers, and the function that counts for its mean."""
    torch.manual_seed(1)
    model, count = LANGUAGE_MODELS[name]
    model = model().double()
    return model, to_sequential(model, Arguments(**padded(4), **more)), count


def pipeline(layers, chunks, **options):
    """Return them in two partitions."""
    half = len(layers) // 2
    return GPipe(
        layers, [half, len(layers) - half], devices=['cpu:0', 'cpu:1'], chunks=chunks, **options
    )


def value_of(output, name='loss'):
    """Return the loss, in whatever it is."""
    return output[name] if isinstance(output, dict) else getattr(output, name)


def trained(model, run):
    """Return the loss that a function gives, which has gone back, and all gradients."""
    model.zero_grad()
    loss = run()
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_near(actual, expected):
    """Compare two lists of tensors."""
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def check(model, pipe, batch, target=None, **options):
    """Compare the loss and the gradients of a call and of a step with the model's."""

    def step():
        return pipe.step(Arguments(**batch), target, lambda output, _: value_of(output), **options)

    expected = trained(model, lambda: value_of(model(**batch)))
    assert_near(trained(model, lambda: value_of(pipe(**batch))), expected)
    assert_near(trained(model, step), expected)
    return expected


@language_models
def test_a_mean_over_the_labels_of_the_mini_batch(name):
    """Of 2 to 9 rows, in micro-batches of 1 to 5, by the plain call and by a step."""
    model, layers, count = make(name)
    for rows, chunks in ((2, 2), (7, 3), (8, 8), (9, 2)):
        pipe = pipeline(layers, chunks, gather={'loss': count})
        batch = padded(rows, rows)
        loss, *_ = check(
            model,
            pipe,
            batch,
            batch['labels'],
            normalizer=lambda labels: count(None, None, labels),
        )
        with torch.no_grad():
            assert_near([value_of(pipe(**batch))], [loss])


class Classifier(nn.Module):
    """Its loss is a submodule."""

    def __init__(self, leaf=False):
        super().__init__()
        self.body, self.loss = nn.Linear(4, 5), nn.CrossEntropyLoss()
        self.loss = Doubled(self.loss) if leaf else self.loss

    def forward(self, x, labels):
        return {'loss': self.loss(self.body(x), labels)}


class Doubled(nn.Module):
    """A loss within another module."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, logits, labels):
        return 2 * self.loss(logits, labels)


@pytest.mark.parametrize(
    'name, checkpoint',
    [('GPT', 'always'), ('Llama', 'never'), ('BERT', 'always'), ('T5', 'never')],
)
def test_a_mean_over_labels_is_taken_for_no_mean_over_samples(name, checkpoint):
    """It is refused before gradients are added; where all count the same, it is one."""
    model, layers, count = make(name)
    pipe = pipeline(layers, 3, gather='mean', checkpoint=checkpoint)
    batch = padded(7)
    for _ in range(2):
        with pytest.raises(ValueError, match='gather={.loss.: lambda ids, mask, labels'):
            pipe(**batch)
        with pytest.raises(ValueError, match="a loss of PyTorch's .* normalizer=lambda target"):
            pipe.step(Arguments(**batch), batch['labels'], lambda output, _: value_of(output))
        with torch.no_grad(), pytest.raises(ValueError, match="so gather='mean' is not the loss"):
            pipe.eval()(**batch)
        pipe.train()
    assert all(p.grad is None for p in model.parameters())
    pipe.step(
        Arguments(**batch), batch['labels'], lambda output, _: value_of(output), normalizer=len
    )
    batch['labels'] = batch['input_ids']
    batch['attention_mask'] = torch.ones_like(batch['attention_mask'])
    check(model, pipe, batch)


def test_a_loss_that_is_a_submodule():
    for leaf in [False, True]:
        model = Classifier(leaf)
        x, labels = torch.rand(5, 4), torch.tensor([1, 2, -100, 3, -100])
        layers = to_sequential(model, Arguments(x, labels), leaves=[Doubled] if leaf else [])
        layers = pickle.loads(pickle.dumps(layers))
        pipe = GPipe(layers, [len(layers)], devices=['cpu'], chunks=2, gather='mean')
        with pytest.raises(ValueError, match="so gather='mean' is not the loss"):
            pipe(x, labels)
        torch.testing.assert_close(pipe(x, labels.clamp(0)), model(x, labels.clamp(0)))


def test_a_mean_over_samples_beside_one_that_is_counted():
    class Two(Llama):
        """It has another loss, which is a mean over samples."""

        def forward(self, input_ids, attention_mask, labels):
            output = super().forward(input_ids, attention_mask, labels)
            return {**output, 'size': output['logits'].square().mean()}

    torch.manual_seed(0)
    model = Two().double()
    layers = to_sequential(model, Arguments(**padded(4)))
    pipe = pipeline(layers, 3, gather={'loss': counted_shifted, 'size': 'mean'})
    output, expected = pipe(**padded(7)), model(**padded(7))
    assert_near([output['loss'], output['size']], [expected['loss'], expected['size']])


def test_a_number_that_the_model_is_given():
    """``num_items_in_batch`` of transformers, as a tensor: it may be another one in each call."""
    model, layers, _ = make('Llama', num_items_in_batch=torch.tensor(7))
    pipe = pipeline(layers, 4, gather={'loss': 'sum'})
    for rows in (2, 5, 9):
        batch = {**padded(rows), 'num_items_in_batch': torch.tensor(11 + rows)}
        check(model, pipe, batch, normalizer=1)


def test_a_mean_over_the_labels_of_several_mini_batches():
    """Of which each counts by its labels, be it by the number that all have, or by their own."""
    model, layers, count = make('Llama')
    batches = [padded(rows, rows) for rows in (3, 9, 2)]
    numbers = [count(**batch) for batch in batches]
    number = sum(numbers)

    def accumulate(loss_of_batch):
        losses = [*map(loss_of_batch, batches, numbers)]
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        return torch.stack(losses).sum().detach()

    expected = trained(
        model,
        lambda: accumulate(lambda batch, n: model(**batch, num_items_in_batch=number)['loss']),
    )
    pipe = pipeline(layers, 4, gather={'loss': count})
    assert_near(
        trained(model, lambda: accumulate(lambda batch, n: pipe(**batch)['loss'] * n / number)),
        expected,
    )
    assert_near(
        trained(
            model,
            lambda: accumulate(
                lambda batch, n: pipe.step(
                    Arguments(**batch),
                    batch['labels'],
                    lambda output, labels: F.cross_entropy(
                        output['logits'][:, :-1].flatten(0, 1),
                        labels[:, 1:].flatten(),
                        reduction='sum',
                    ),
                    normalizer=number,
                )
            ),
        ),
        expected,
    )


def test_micro_batches_in_which_nothing_counts():
    """They are left out; a mini-batch of nothing else is refused, as it has no mean."""
    model, layers, count = make('GPT')
    pipe = pipeline(layers, 4, gather={'loss': count})
    batch = padded(4)
    batch['labels'][2:] = -100
    expected = trained(model, lambda: model(**batch).loss)
    assert expected[0].isfinite()
    assert_near(trained(model, lambda: pipe(**batch).loss), expected)
    batch['labels'][:] = -100
    with pytest.raises(ValueError, match='gather counts nothing in the whole input'):
        pipe(**batch)


def test_functions_of_gather():
    """They are called like the model, and count for means: scalars and named outputs."""

    class Means(nn.Linear):
        def forward(self, x, *, n):
            x = super().forward(x) * n
            return {'y': x, 'of': {'mean': (x * n).sum() / n.sum(), 'rows': x.sum(0) / n.sum()}}

    def count(x, *, n):
        return n.sum()

    model, x, n = Means(3, 2).double(), torch.rand(5, 3).double(), torch.arange(1.0, 6)[:, None]
    expected = model(x, n=n)
    for rule in ({'of': {'mean': count, 'rows': count}}, {'of': count}):
        pipe = GPipe(nn.Sequential(model), [1], devices=['cpu'], chunks=3, gather=rule)
        output = pipe(x, n=n)
        torch.testing.assert_close(output, expected)
    pipe = GPipe(nn.Sequential(model), [1], devices=['cpu'], chunks=5, gather=count)
    with pytest.raises(ValueError, match="as output.'of'..'rows'.: outputs are"):
        pipe(x, n=n)
    pipe = GPipe(
        nn.Sequential(model), [1], devices=['cpu'], chunks=3, gather={'of': lambda x, n: -1}
    )
    with pytest.raises(ValueError, match='gather must count .* the input .*, but gave int -1'):
        pipe(x, n=n)


class OneEach(nn.Module):
    """A loss of each sample."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, y):
        return F.cross_entropy(self.head(self.body(x).relu()), y, reduction='none')


def test_losses_of_samples_are_put_together_by_their_dimension():
    model, x, y = OneEach(), torch.rand(4, 3), torch.tensor([0, 1, 2, 1])
    layers = to_sequential(model, Arguments(x, y))
    for rule in (None, 0, 'mean'):
        gpipe = GPipe(layers, [len(layers)], devices=['cpu'], chunks=2, gather=rule)
        assert torch.allclose(gpipe(x, y), model(x, y))


class TwoLosses(nn.Module):
    """A loss over labels that are not padding, and one that is a mean over samples."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x, labels=None):
        logits = self.head(x)
        if labels is None:
            return {'logits': logits}
        return {
            'ce': F.cross_entropy(logits, labels, ignore_index=0),
            'aux': logits.square().mean(),
        }


def test_rules_of_some_outputs_say_nothing_of_others():
    x, labels = torch.rand(4, 3), torch.tensor([0, 1, 2, 1])
    layers = to_sequential(TwoLosses(), Arguments(x, labels))
    gpipe = GPipe(
        layers, [len(layers)], devices=['cpu'], chunks=2, gather={'ce': 'stack', 'aux': 'mean'}
    )
    assert torch.allclose(gpipe(x, labels)['aux'], layers(x, labels)['aux'])


def test_a_count_matters_where_it_is_used_only():
    x, labels = torch.rand(4, 3), torch.zeros(4, dtype=torch.long)
    gpipe = GPipe(
        nn.Sequential(TwoLosses()),
        [1],
        devices=['cpu'],
        chunks=2,
        gather={'ce': lambda x, labels: (labels != 0).sum(), 'aux': 'mean'},
    )
    assert gpipe(x)['logits'].shape == (4, 3)
    gpipe.step(x, x, lambda output, _: output['logits'].square().mean())
    with pytest.raises(ValueError, match='gather counts nothing in the whole input'):
        gpipe(x, labels)


def test_a_step_names_a_loss_of_a_layer():
    class Logs(TwoLosses):
        def forward(self, x):
            return self.head(x), F.cross_entropy(self.head(x), x.argmax(1), ignore_index=0)

    x = torch.eye(3)[[0, 1, 2, 1]]
    layers = to_sequential(Logs(), x)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'], chunks=2)
    with pytest.raises(ValueError, match="loss of PyTorch's in a layer divides"):
        gpipe.step(x, x, lambda output, _: output[0].square().mean())
