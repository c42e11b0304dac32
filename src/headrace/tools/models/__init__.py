"""`headrace models`: the families of models, and what works with each."""
