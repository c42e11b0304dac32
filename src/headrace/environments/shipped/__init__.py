"""The environments that come with Headrace, one a file; `registry.py` knows them by id."""
