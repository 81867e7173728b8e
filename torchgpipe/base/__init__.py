"""The base of all other folders: the context of threads, devices, values, settings, and text.

Terms of this folder:

accelerator
    The kind of device with streams in this process, such as CUDA or XPU.
context
    The thread-local state of a pipeline: the thread's cell, its skips and its pass.
kind
    A function that reconstructs a value from its tensors.
leaf
    A tensor or a plain Python value within a nested value.
path
    The place of a leaf in a nested value: keys, indices and names of attributes.
slot
    The place of a parameter or a buffer: a module and a name.
storage
    The memory of a tensor. Tensors that are views of each other share one storage.
version
    PyTorch's count of the changes in place of a tensor.
"""
