"""The daemon: it watches cache roots, bounds them, keeps figures, and tells.

Everything that it does, a command does without it; the daemon does it continuously.
"""
