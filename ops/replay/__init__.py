"""`minisgl replay`: open, compute again, send again, take out and put in requests that were served."""
