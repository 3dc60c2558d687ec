"""What channels a network has, which of them belong together, and what each of them costs.

Takes a model and an example input (`analyse`); gives a `ChannelGraph`: masks of gates that may be closed, the cost of
every layer as a function of them, the reason for all that is frozen, and (`plan`) how to build the network without the
closed channels. A gate is a number here, open or closed: the package does not know of probabilities, training or files.
"""
