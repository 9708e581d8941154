"""How the demo model is made, which `minisgl serve` uses where none is given; it lies in stages/generate/model/demo."""
