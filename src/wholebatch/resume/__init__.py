"""What a checkpoint holds, on which edge it is made, and how a run goes on from it.

``checkpoints.py`` has the class. ``contents.py`` takes the state out of a run and puts it back,
``folder.py`` writes and checks the folder on disk, ``sharded.py`` writes what the ranks hold in parts.
"""

from __future__ import annotations

from wholebatch.resume.checkpoints import Checkpoints as Checkpoints
from wholebatch.resume.checkpoints import Found as Found
from wholebatch.resume.contents import TrainingParts as TrainingParts
from wholebatch.resume.folder import CheckpointFacts as CheckpointFacts
