"""Shared matching of the fusion passes: what a node means, whichever views, casts and operand orders spell it.

``layout``: where the elements of a tensor lie in the tensor below its views. ``frames``: the axes under which a
subgraph is read. ``unify``: patterns over them. ``match``: what a pattern bound. ``masks``: a mask as a conjunction of
atoms. ``affine`` and ``lengths``: integer expressions, and masks that are a length. ``pieces``: concatenations.
``picks``: users of a top-k's indices. ``refusal``: why a match failed. ``rewrite``: new nodes. ``rule``: what passes
share. The other modules each know one thing that models contain.
"""
