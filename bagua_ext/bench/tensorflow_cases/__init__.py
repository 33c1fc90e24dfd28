"""The cases with TensorFlow's binding, as ``cases`` has those with PyTorch's."""
