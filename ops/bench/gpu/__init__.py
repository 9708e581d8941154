"""`minisgl bench gpu`: what this code does on a GPU, in the few minutes that there is one.

Each phase is a module with a `run`, and a process of its own. This file imports nothing: a bare machine reads it too.
"""
