"""Where the dispatcher meets vLLM. Nothing here is imported unless vLLM asks for it."""
