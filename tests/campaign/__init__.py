"""The fault campaign: a training job is broken at a named place, gone on with, and compared.

``cases.py`` says what a case is and ``kinds.py`` lists them all; ``places.py`` and ``child.py`` run and
break a job in processes of its own; ``trial.py`` judges one case, and ``table.py`` sums up.
``python -m campaign`` runs it, from ``tests/``.
"""
