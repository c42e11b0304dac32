"""Does an algorithm keep its word? Worked numbers and invariants for those that ship and for anybody's own.

Everything happens in memory, in a second or two: no model is loaded, and nobody is contacted. Left out on purpose:
whether an algorithm learns anything. Only a run can say that.
"""
