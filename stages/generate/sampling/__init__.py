"""From logits to tokens: what shapes them, what is drawn, and how probable it was."""
