"""The wire contract of the OpenAI API."""
