"""Messages to tokens and back, without torch or transformers."""
