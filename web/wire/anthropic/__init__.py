"""The bodies, answers and frames of /v1/messages, Anthropic's API: https://docs.anthropic.com/en/api/messages."""
