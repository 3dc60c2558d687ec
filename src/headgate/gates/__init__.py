"""How gates are drawn, what the open ones cost, and what pulls that cost to a target.

Takes a `ChannelGraph`; gives gates that gradients pass through, the hooks that multiply channels by them, and the cost
of a forward pass as a loss. The package does not know how gates are decided once the network is trained, nor what a
network without the closed channels looks like.
"""
