"""What a pointwise region computes, element by element: the language between the pass that grows regions and codegen.

A region is read backwards: the value of a node at an index is asked for, views turn into arithmetic on the index, and
what comes from outside becomes a load at an address. Both sides use it, so a region that the pass made can be built.
"""

from kimigraph.ir.pointwise.index import Index, Variable
from kimigraph.ir.pointwise.loops import Loops, Store, lower
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import Load, Value

__all__ = ["Index", "Load", "Loops", "Store", "Unfusable", "Value", "Variable", "lower"]
