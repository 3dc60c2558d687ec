"""Early exit: intermediate classifiers, and gates that decide from what they see there whether an image can leave.

Takes any model with named cut points, plain, shrunk or gated; gives a cascade that trains towards a cost and really
takes out of the batch who leaves. Knows the gated model; knows nothing of training loops, files or the command line.
"""
