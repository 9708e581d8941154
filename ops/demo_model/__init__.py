"""The model that `minisgl serve` uses when it is given none, and how one that answers is trained."""
