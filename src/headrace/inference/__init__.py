"""The HTTP server, the embedded engine behind it, and the client that calls it."""
