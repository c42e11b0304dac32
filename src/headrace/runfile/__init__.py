"""The typed run file: reads, merges, checks, explains and writes it.

Importing the package imports all declarations of what a run file can name, so that their registries are filled.
"""

from headrace import algorithms
from headrace.imports import import_declarations
from headrace.orchestrator import curriculum as curriculum
from headrace.orchestrator import filters as filters
from headrace.orchestrator import gate as gate
from headrace.trainer import losses

for package in (algorithms, losses):
    import_declarations(package)
