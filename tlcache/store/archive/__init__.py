"""Archives: kernels of a cache root with their records and calls, as one file that is checked
before any of it lands in another root.

    FILE.tar.zst        zstd of a tar of plain files; the first is `index.json`, which names all
                        others in their order, with sizes and sha256
    FILE.tar.zst.sig    a detached signature by `ssh-keygen -Y sign`, in the namespace `tlcache`

Invariant: the same files of a root give the same bytes, by the same version of zstandard. Nothing
of an archive is published that has not been checked whole.
"""
