"""The Python interface, which `headrace` exports: start, follow and read runs, evaluate, sample and score.

The commands of the same names print what these functions return.
"""
