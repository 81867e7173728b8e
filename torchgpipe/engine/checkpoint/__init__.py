"""Checkpointing: keep a cell's input, and recompute its activations in backward.

[Note: How checkpointing works]
The cell runs once, in grad mode, so its autograd graph is the one that the unwrapped model
would have, only hollow: each tensor that a node would save is replaced by its number, through
saved-tensor hooks, and freed. In backward the cell runs once more, to make these tensors again::

    forward     x ──▶ [ layers, hollow ] ──▶ y ──Checkpoint──▶ (Wait) ──▶ Tie ──▶ y'
                                                                Recompute ──┘
    backward    1. Tie runs as soon as the gradient is on its way.
                2. Recompute runs the cell again; the tensors it saves fill the hollow graph.
                3. Wait lets the compute stream wait for the gradient: only after the recomputation
                   has been queued, so the two overlap.
                4. Checkpoint finds the graph filled (or fills it, where autograd was asked for
                   some gradients only and left Recompute out).
                5. The layers' own nodes run; each takes its tensors out and so frees them.

Since gradients flow through the layers' own graph, a parameter's gradient is complete, and
its hooks are called, once per backward and not once per micro-batch; `torch.autograd.grad`
works; and a recomputation that took another path than the first pass is found out.
This is the non-reentrant variant of Chen et al., "Training Deep Nets with Sublinear Memory Cost"
(2016), with the recomputation split off as in Kim et al., "torchgpipe" (2020).
"""
