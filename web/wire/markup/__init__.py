"""Reads the text of an answer: what is content, what is reasoning, and what is a call of a tool."""
