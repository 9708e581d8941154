"""The OpenAI wire protocol as pure functions: requests in, bodies and chunks out. Knows neither HTTP nor the log."""
