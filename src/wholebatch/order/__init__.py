"""Which sample comes when: the same update sees the same samples under any (m, A, D).

Read ``samples.py`` first: the order of one data set, in global batches of so many samples. ``items.py``
bounds them in items, ``mixing.py`` draws from several sources, ``permutation.py`` is the shuffle of all.
"""

from wholebatch.order.items import ItemOrder as ItemOrder
from wholebatch.order.mixing import MixedOrder as MixedOrder
from wholebatch.order.mixing import Source as Source
from wholebatch.order.samples import ORDER_RULE as ORDER_RULE
from wholebatch.order.samples import Order as Order
from wholebatch.order.samples import ReplicaShare as ReplicaShare
from wholebatch.order.samples import SampleOrder as SampleOrder
from wholebatch.order.samples import epoch_permutation as epoch_permutation
from wholebatch.order.samples import format_digest as format_digest
from wholebatch.order.samples import random_numbers as random_numbers
from wholebatch.order.samples import sample_digest as sample_digest
