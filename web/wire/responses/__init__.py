"""OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses."""
