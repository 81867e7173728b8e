"""Train a GPT on a mesh of data × pipe × tensor: the whole trainer, to read from top to bottom.

::

    torchgpipe-train-gpt                                            a small model, one process
    torchgpipe-train-gpt --data 2 --pipe 2                          four processes of its own
    torchrun --nproc-per-node 8 -m torchgpipe.trainer --pipe 8      processes of torchrun
    torchgpipe-train-gpt --plan auto --devices 4                    a mesh that a plan chooses
    torchgpipe-train-gpt --pipe 64 --dry-run                        the needs of 64 ranks

    command ─▶ launch ─▶ train: data, prediction, model, optimizer, newest checkpoint
                 ▲ │       each step: sample ─▶ step ─▶ clip ─▶ update ─▶ save ─▶ validate, log
                 └─┘ a rank was killed: all start again from the newest checkpoint

Initial values follow from the seed, and samples from seed and step, or from the order of a
streamed dataset. So losses match on all meshes, and a training resumes on any mesh with the
samples that an uninterrupted one would have next.

The options are the fields of ``Config`` in ``config.py``. The model is in ``gpt.py``.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torchgpipe.base.devices import is_cpu
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.config import PARAMETER_DTYPES, Config
from torchgpipe.trainer.gpt import (
    GPT,
    Block,
    Mixture,
    Sizes,
    chunked_cross_entropy,
    init_gpt2,
    layers,
    layers_with_experts,
    tensor_plan,
)
from torchgpipe.trainer.prediction import predict
from torchgpipe.trainer.ranks import check_finite, from_first_rank
from torchgpipe.trainer.stream import TokenStream
from torchgpipe.trainer.tokens import TokenFiles, samples_at, validation_parts
from torchgpipe.trainer.training_folder import TrainingFolder
from torchgpipe.trainer.training_report import Phase, Report


def train(config: Config, training: dict[str, Any]) -> None:
    """Run one rank, from its place in the mesh to the end of the training.

    Args:
        config: The options, after :func:`~torchgpipe.trainer.config.complete`.
        training: The description of the training; ranks use the first rank's.
    """
    start = time.perf_counter()
    torch.use_deterministic_algorithms(config.deterministic)
    kind = config.device.type
    mesh = init_mesh(config.data, config.pipe, config.tensor, device_type=kind)
    device = config.device  # of this rank, which the mesh has chosen
    replica = mesh.get_local_rank('data')
    training = from_first_rank(training, device)

    # The prediction measures a few layers. With `--plan auto`, it also chooses the settings of the
    # step, such as the number of micro-batches, by which the samples of a step are divided.
    loss_fn = partial(training_loss, config)
    plan = predict(config, build_layers, loss_fn, device)
    samples_per_replica = config.global_batch_size // config.data
    config = replace(config, micro_batch_size=samples_per_replica // plan.chunks)

    # Data, model and optimizer.
    dataset = open_data(config)
    report = Report(config, training['name'], mesh, plan, start)
    model = build_model(config, mesh, plan)
    optimizer = build_optimizer(config, model.parameters())

    # The newest checkpoint.
    folder = TrainingFolder(config.save)
    state: dict[str, Any] = {'step': 0}
    if config.save:
        state = folder.begin(training, model, optimizer, config.resume)
    step = state['step']
    if step:
        dataset.seek(state.get('data', {}))
    # The line of a step in the log.
    entry = report.begin(model, step, state.get('entry'))
    if entry:
        # A rank was killed after it saved the step, and before it logged it.
        validate_and_log(config, model, dataset, report, entry)

    while step < config.steps:
        step += 1
        is_last = step == config.steps
        is_validated = config.is_validated(step)
        is_logged = step % config.log_interval == 0 or is_validated
        is_saved = config.save and (step % config.save_interval == 0 or is_last)

        # Sample: the samples of this replica, with the next token of each token.
        batch = dataset.batch(step - 1, replica, device)
        report.lap(Phase.SAMPLES)

        with report.measured(model, is_logged) as metrics:
            # Step: forward and backward of all micro-batches, whose gradients accumulate. The loss
            # is the mean over the samples of all replicas.
            with autocast(config, device):
                loss = model.step(batch.x, batch.y, loss_fn, schedule='auto').item()
            report.lap(Phase.STEP)

            # Clip the norm of all gradients, over all ranks.
            norm = model.clip_grad_norm_(config.max_norm).item()
            check_finite(model, step, loss, norm)
            report.lap(Phase.CLIP)

            # Update.
            lr = learning_rate(config, step - 1)
            for group in optimizer.param_groups:
                group['lr'] = lr
            optimizer.step()
            optimizer.zero_grad()
        report.lap(Phase.UPDATE)

        entry = None
        if is_logged:
            entry = report.entry(step, loss, norm, lr, metrics)
        report.end_step(step, batch.starts)

        # Save. A checkpoint comes before its validation, which may fail, and has the entry of the
        # log, which comes after the validation.
        if is_saved:
            extra = {
                'step': step,
                'entry': from_first_rank(entry, device),
                'data': batch.position,
            }
            # A validation may fail, and end ranks that still write.
            wait = is_validated or not config.async_save
            folder.save(step, model, optimizer, extra, wait, config.keep_last)
            report.lap(Phase.SAVE)

        # Validate and log.
        if entry:
            validate_and_log(config, model, dataset, report, entry)

    generated = generate(config, model)
    report.end(generated)
    dist.destroy_process_group()


def open_data(config: Config) -> TokenFiles | TokenStream:
    """Return the data, which gives the samples of each step, and tokens to validate with."""
    if config.dataset:
        return TokenStream(config)
    return TokenFiles(config)


def build_layers(config: Config, depth: int) -> nn.Sequential:
    """Return the layers of the model: the embedding, each block, the head."""
    sizes: Sizes = config.sizes._replace(depth=depth)
    with_scores = not config.chunked_loss
    if config.experts:
        module = layers_with_experts(sizes, config.experts, with_scores)
    else:
        module = layers(GPT(sizes), with_scores)
    return module.to(PARAMETER_DTYPES[config.dtype])


def model_options(config: Config) -> dict[str, Any]:
    """Return how ranks share parameters: over the tensor axis, over replicas, with the host."""
    options: dict[str, Any] = {'tensor_plan': None}
    if config.tensor > 1:
        options['tensor_plan'] = tensor_plan(
            config.sequence_parallel, not config.chunked_loss, config.experts > 0
        )
    if config.shard or config.offload:
        options['data'] = 'shard'
        if config.dtype == 'bfloat16':
            options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if config.offload:
        options['offload_policy'] = CPUOffloadPolicy(pin_memory=not is_cpu(config.device))
    return options


def build_model(config: Config, mesh: Any, plan: Any) -> DistributedGPipe:
    """Return the model on this rank's device, with initial values that follow from the seed."""
    with torch.device('meta'):
        module = build_layers(config, config.n_layer)
    model = DistributedGPipe(
        module,
        plan,
        mesh=mesh,
        seed=config.seed,
        init=partial(init_gpt2, depth=config.n_layer),
        **model_options(config),
    )
    if config.compile:
        for block in model.modules():
            if isinstance(block, (Block, Mixture)):
                block.compile()
    return model


def build_optimizer(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices."""
    matrices, vectors = [], []
    for parameter in parameters:
        if parameter.dim() > 1:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups: list[dict[str, Any]] = []
    if matrices:
        groups.append({'params': matrices, 'weight_decay': config.weight_decay})
    if vectors:
        groups.append({'params': vectors, 'weight_decay': 0.0})
    return torch.optim.AdamW(groups, config.lr, (0.9, 0.95))


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step, from 0 on: it grows, then falls as a cosine."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, config.steps - 1 - config.warmup_steps)
    part = min(1, (step - config.warmup_steps) / decay_steps)
    height = (1 + cos(pi * part)) / 2
    return config.min_lr + height * (config.lr - config.min_lr)


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return the context of forward passes."""
    is_enabled = config.dtype == 'bfloat16'
    return torch.autocast(device.type, torch.bfloat16, enabled=is_enabled)


def training_loss(config: Config, output: Any, target: Tensor) -> Tensor:
    """Return the loss to train with: cross entropy, and the mean auxiliary loss of experts."""
    loss = cross_entropy(config, output, target)
    if config.experts:
        loss = loss + output[1].mean()
    return loss


def cross_entropy(config: Config, output: Any, target: Tensor) -> Tensor:
    """Return the mean over tokens.

    Scores (logits) may be split by vocabulary, or computed by chunks of tokens.
    """
    scores = output
    if config.experts:
        scores = output[0]
    if config.chunked_loss:
        return chunked_cross_entropy(scores, target, config.chunked_loss)
    return parallel_cross_entropy(scores, target)


def validate_and_log(
    config: Config,
    model: DistributedGPipe,
    dataset: TokenFiles | TokenStream,
    report: Report,
    entry: dict[str, Any],
) -> None:
    """Add the loss of a validation to the entry of a step, if the step has one, and log it."""
    if config.is_validated(entry['step']):
        entry['val_loss'] = validate(config, model, dataset.val, report)
        report.lap(Phase.VALIDATION)
    report.log(entry)
    report.lap(Phase.LOG)


@torch.no_grad()
def validate(
    config: Config,
    model: DistributedGPipe,
    tokens: Tensor,
    report: Report,
) -> float:
    """Return the exact mean over the tokens of some batches, or of all."""
    device = model.devices[0]
    loss_fn = partial(cross_entropy, config)
    model.eval()
    # The samples have equally many tokens.
    total = 0.0
    count = 0
    parts = validation_parts(config, len(tokens), report.replica)
    for samples, starts in report.progress(parts, 'validation'):
        x, y = samples_at(config, tokens, starts, device)
        with autocast(config, device):
            loss, _ = model.evaluate(x, y, loss_fn)
        total += samples * loss.item()
        count += samples
    model.train()
    return total / count


def generate(config: Config, model: DistributedGPipe) -> list[int]:
    """Return tokens that the model draws one after the other, at a temperature of 0.8."""
    device = model.devices[0]
    generator = torch.Generator().manual_seed(config.seed)
    tokens = [config.first_token]
    model.eval()
    for _ in range(config.generate):
        context = tokens[-config.block_size :]
        last = len(context) - 1
        if config.sequence_parallel:
            # Ranks divide a sequence into equal parts. No token sees the later ones.
            context += [0] * (-len(context) % config.tensor)
        with autocast(config, device):
            output = model(torch.tensor([context], device=device))

        token = torch.full((1,), -1, device=device)
        if output is not None:
            # This rank has the last stage.
            scores = next_scores(config, output, last)
            probabilities = torch.softmax(scores.double().cpu() / 0.8, -1)
            token[0] = probabilities.multinomial(1, generator=generator)
        dist.all_reduce(token, dist.ReduceOp.MAX)
        tokens.append(int(token))
    return tokens[1:]


def next_scores(config: Config, output: Any, index: int) -> Tensor:
    """Return the scores of the token after the one at an index of the only sample."""
    scores = output
    if config.experts:
        scores = output[0]
    if config.chunked_loss:
        features = whole(scores.features)
        weight = whole(scores.weight)
        return features[0, index] @ weight.t()
    return whole(scores)[0, index]


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of all ranks that have a part of it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
