"""Where tasks come from: the rows of files and datasets, and of the sets that have a name. Never imports torch."""
