"""OpenAI's protocol: what its endpoints take and send. Knows neither HTTP nor the log."""
