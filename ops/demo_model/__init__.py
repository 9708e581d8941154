"""The model that `minisgl serve` uses when it is given none."""
