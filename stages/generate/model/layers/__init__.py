"""The layers of the decoder."""
