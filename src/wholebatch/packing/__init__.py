"""Ragged samples to micro-batches, under a hard bound and even over the replicas.

Read ``packing.py`` first: what is asked and what comes back. ``padded.py`` and ``packed.py`` cut,
``balance.py`` deals the micro-batches to the replicas, ``cost.py`` says what they cost, ``checks.py``
refuses what can't be packed.
"""

from wholebatch.packing.checks import Called as Called
from wholebatch.packing.checks import TooLong as TooLong
from wholebatch.packing.checks import checked_bound as checked_bound
from wholebatch.packing.cost import CostModel as CostModel
from wholebatch.packing.cost import checked_cost as checked_cost
from wholebatch.packing.packing import Packing as Packing
from wholebatch.packing.packing import Rows as Rows
from wholebatch.packing.packing import pack as pack
