"""The engine: execution of micro-batches in partitions, forward and backward.

Terms of this folder:

action
    One entry of a schedule: the forward, recomputation or backward of a micro-batch in a stage.
cell
    One micro-batch in one partition: a function from tensors to tensors.
copy stream
    A stream that copies one micro-batch between memories, concurrently with the compute stream.
first pass
    The forward of a checkpointed cell, whose graph saves numbers in place of tensors.
leaf
    A detached tensor that accumulates gradients in a step: an input of a cell or a parameter.
micro-batch
    A slice of the mini-batch along the batch dimension.
partition
    Consecutive layers of the model on one device.
phony
    A tensor without elements, which only adds an edge to the autograd graph.
recomputation
    The second run of a checkpointed cell, in backward, for the tensors that its graph saves.
run
    One pass of all micro-batches through all partitions: a plain call or a step.
skip
    A tensor that a layer stashes and a layer of the same or a later partition pops.
transport
    The way in which a run moves tensors from cell to cell: graph edges, or leaves and messages.
worker
    The thread that runs the cells of one device.
"""
