"""Ended requests in files, which outlive Redis. A format, a writer for archivers, a reader for all."""
