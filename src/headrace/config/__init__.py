"""One typed tree for a run file, and how it is read, merged, checked and written."""
