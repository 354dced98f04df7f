"""What lies on disk: TileLang's entries, and tlcache's records beside them. No torch, no
TileLang.
"""
