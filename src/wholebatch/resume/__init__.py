"""What a checkpoint holds, on which edge it is made, and how a run resumes from it.

``checkpoints.py`` has the class. ``contents.py`` takes the state out of a run and puts it back,
``refusals.py`` says what does not fit, ``sharded.py`` and ``stages.py`` write what the ranks hold in parts;
the folder on disk is ``checkpoint_folder``'s.
"""

from __future__ import annotations

from wholebatch.checkpoint_folder import CheckpointFacts as CheckpointFacts
from wholebatch.resume.checkpoints import Checkpoints as Checkpoints
from wholebatch.resume.checkpoints import Found as Found
from wholebatch.resume.contents import TrainingParts as TrainingParts
