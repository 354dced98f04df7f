"""The directory that `tlcache run` puts in front of PYTHONPATH; Python runs the `sitecustomize` in
it at every start.
"""

from __future__ import annotations
