"""A local web page over run directories, live or finished: `headrace view`.

`server` answers requests, `routes` names them, and each other module reads one kind of file and returns plain data:
`runs`, `series`, `rollouts`, `draws`, `evaluations`, `waterfall`. `export` writes the same answers as files.

Everything is read-only. Names in a request are looked up in what was found on disk and never become a part of a path.
Code that a run's configuration names is not imported: a run directory may come from somewhere else.
"""
