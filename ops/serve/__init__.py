"""`minisgl serve` and `minisgl stage`: from a command line to the processes of a server."""
