"""Views on the log for people: pure folds into plain data. No clock, no log, no layout."""
