"""From trained gates to a network that is used: decide, calibrate, shrink, check, write, export.

Takes a `ChannelGraph`, the probabilities of its gates and their cost; gives decisions within a target, the smaller
network that computes the same, and files of both kinds (safetensors, ONNX). The package does not know how gates are
trained, nor the class of the gated model.
"""
