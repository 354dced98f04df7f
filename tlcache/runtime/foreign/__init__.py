"""Kernels of programs that call TileLang themselves, restored without being traced anew.

Invariant: a kernel is restored only if everything that could have decided what it is was seen and
is as it was when its record was made. What cannot be seen into is refused, with the reason, and the
program goes TileLang's own way.
"""

from __future__ import annotations
