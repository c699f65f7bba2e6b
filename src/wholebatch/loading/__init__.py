"""Loading: from a data set to windows, each of them one replica's micro-batches of a global batch.

``loader.py`` is the door; ``parts.py`` says which samples are read together, ``reading.py`` makes
micro-batches of them, ``ahead.py`` does that in worker processes, ``stream.py`` takes samples as they
arrive, ``padding.py`` collates.
"""

from wholebatch.loading.batches import WindowBatches as WindowBatches
from wholebatch.loading.loader import WindowLoader as WindowLoader
from wholebatch.loading.padding import PadCollate as PadCollate
from wholebatch.loading.padding import pad_collate as pad_collate
