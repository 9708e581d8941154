"""`minisgl top`: the pipeline live in the terminal."""
