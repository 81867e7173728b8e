"""Checkpointing: keep a cell's input, and recompute its activations in backward.

Terms of this folder:

draw
    The use of a random generator by a cell. A recomputation repeats the draws of the first pass.
first pass
    The forward of a checkpointed cell, whose graph is hollow.
hollow graph
    An autograd graph whose nodes save numbers in place of tensors.
kept result
    The result of an operation that the first pass keeps, so that the recomputation does not run
    the operation.
policy
    A function that decides which results are kept.
recomputation
    The second run of a cell, in backward, whose saved tensors fill the hollow graph.
sample
    Some elements of an output, by which a recomputation is compared with the first pass.
swap
    A substitute for an attribute or a parameter of a module, and its restoration.
watch
    A dispatch mode that observes in a first pass which tensors and attributes layers change.

[Note: How checkpointing works]
The cell runs once, in grad mode, so it has the autograd graph of the unwrapped model, but hollow.
Saved-tensor hooks replace each tensor that a node would save by its number, and the tensor is
freed. In backward the cell runs once more, to make these tensors again::

    forward     x ──▶ [ layers, hollow ] ──▶ y ──Checkpoint──▶ (Wait) ──▶ Tie ──▶ y'
                                                                Recompute ──┘
    backward    1. Tie runs as soon as the gradient is queued.
                2. Recompute runs the cell again; the tensors it saves fill the hollow graph.
                3. Wait lets the compute stream wait for the gradient: only after the recomputation
                   has been queued, so the two overlap.
                4. Checkpoint finds the graph filled (or fills it, where autograd was asked for
                   some gradients only and left Recompute out).
                5. The layers' own nodes run; each takes its tensors out and so frees them.

Gradients flow through the layers' own graph. So a parameter's gradient is complete, and its hooks
are called, once per backward and not once per micro-batch. `torch.autograd.grad` works, and a
recomputation that took another path than the first pass is detected.
This is the non-reentrant variant of Chen et al., "Training Deep Nets with Sublinear Memory Cost"
(2016). The recomputation is split off as in Kim et al., "torchgpipe" (2020).
"""
