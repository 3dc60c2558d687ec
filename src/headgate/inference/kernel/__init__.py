"""A convolution of only the open channels of each image: C++ where it was compiled, its plain twin elsewhere."""

from headgate.inference.kernel.native import kernel_level
from headgate.inference.kernel.op import masked_conv2d

__all__ = ["kernel_level", "masked_conv2d"]
