"""`minisgl shell`: a chat in the terminal with any OpenAI server. It knows HTTP alone, so nothing here needs torch."""
