"""The HTTP side: OpenAI schemas, routes, the tail of the replies. Imports pipeline only; never torch, never transformers."""
