"""The tensors of a model: values on the meta device, files of weights, and the model as it was."""
