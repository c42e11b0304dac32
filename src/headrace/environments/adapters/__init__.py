"""Environments that others have written, behind our own interface: one module per library.

`id = "LIBRARY:NAME"` in a run file names one (`registry.ADAPTERS` lists the libraries). Each library is an extra of its
own, is imported in its module alone, and not before an environment of it is loaded.
"""
