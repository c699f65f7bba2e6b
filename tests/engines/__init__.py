"""One table of all engines: the same updates on each, held against the big batch in float64."""
