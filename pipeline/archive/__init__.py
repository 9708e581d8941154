"""Requests that have ended, in files: they outlive Redis. A format, a writer for archivers, a reader for everybody."""
