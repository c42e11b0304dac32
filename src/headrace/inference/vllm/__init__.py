"""vLLM behind the same door: started, driven and updated from here."""
