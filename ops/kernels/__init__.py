"""The kernels, one operator a file: workload, schedule, factory, bodies, bound kernel.

Importing one brings neither torch nor TileLang; both are imported where a kernel is built or bound.
"""
