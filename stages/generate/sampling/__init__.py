"""From logits to tokens: changes the logits, draws tokens, and scores them."""
