"""vLLM as an engine: started as a child process, called over HTTP, updated through its workers."""
