"""HTTP paths, one blueprint per module. A route reads a body, asks `web.live`, and makes a response."""
