"""Training: one step by a schedule, and the loss of a mini-batch.

Terms of this folder:

count
    The part of a micro-batch that its loss is a mean over, such as its number of samples.
divisor
    The number by which a loss divides its sum.
loss
    The scalar that ``loss_fn(output, target)`` returns for a micro-batch.
normalizer
    The rule for the divisor of the mini-batch's loss: a function that counts, or a number.
reduction
    The setting of PyTorch's losses that selects a mean, a sum, or no reduction.
rule of ``gather``
    The way to combine an output of all micro-batches, such as a mean.
step
    Forward and backward of a mini-batch by a schedule, with the loss computed inside.
"""
