"""The tensors of a model: values on the meta device, files of weights, and the model as it was.

Terms of this folder:

blank
    Memory that was allocated, but not written to yet.
layer
    A child of the sequential module from which a pipeline is made.
loader
    Reads the tensors of one layer after the other from weights.
reset
    A call of ``reset_parameters()`` of a module, which draws initial values.
slot
    The place of a parameter or buffer: a module and a name.
transient buffer
    A buffer that is not in the module's state dict.
weights
    The tensors of a state dict by name, in memory or in files.
"""
