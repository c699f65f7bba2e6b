"""A run's folder: its header and records, written as the run goes and read by whoever wants to see them.

``wholebatch.record`` says what is in it. ``log.py`` writes, ``reader.py`` reads what can be trusted,
``tail.py`` reads on while somebody writes, ``resumption.py`` brings the folder back to a checkpoint.
"""

from wholebatch.run_folder.log import RunLog as RunLog
from wholebatch.run_folder.log import only_writer as only_writer
from wholebatch.run_folder.log import used_folder as used_folder
from wholebatch.run_folder.reader import Run as Run
from wholebatch.run_folder.reader import read_run as read_run
from wholebatch.run_folder.tail import RunTail as RunTail
