"""Devices that capture graphs: `npu` drives a `torch.npu` namespace, `emulated` is one on CPU tensors."""
