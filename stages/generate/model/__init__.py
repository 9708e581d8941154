"""Architectures as data (spec.py) and the one decoder that reads them."""
