"""Generation in this process, without Redis, processes or HTTP: `LLM`. The stages are the server's own, as threads."""

from ops.offline.call import Completion, GenerationFailed
from ops.offline.llm import LLM

__all__ = ["LLM", "Completion", "GenerationFailed"]
