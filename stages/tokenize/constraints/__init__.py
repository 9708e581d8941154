"""What an answer must be: from a request's schema, pattern or tools to a grammar that was checked."""
