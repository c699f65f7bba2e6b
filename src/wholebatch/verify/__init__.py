"""Is my split equal to the big batch? The real window against the oracle, on the user's model and loss.

From the bottom: ``trial`` runs the whole batch and the window; ``plain`` adds micro-batches up without
the window; ``diagnosis`` (with ``thirds`` and ``padding``) finds why two of them differ; ``comparison``
measures one split with its bounds;
``judge`` tries the splits and reaches the verdict, which ``verification`` writes down.
"""

from wholebatch.verify.judge import verify_window as verify_window
from wholebatch.verify.verification import Verification as Verification
