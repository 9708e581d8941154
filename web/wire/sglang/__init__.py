"""The endpoints of Mini-SGLang and SGLang that are not OpenAI's: what they take, and how they put an answer."""
