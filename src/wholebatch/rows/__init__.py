"""Packed rows: the samples of a micro-batch in one row, one after the other, without padding.

A packed micro-batch is a dict of tensors::

    input_ids       [1, tokens]   the samples, in order
    position_ids    [1, tokens]   0 at the first token of each sample
    labels          [1, tokens]   for a loss that shifts, ignored at the first token of each sample
    sample_lengths  [samples]     tokens of each sample; on the host
    sample_ids      [samples]     which samples they are; on the host

A row costs what its tokens cost, and nothing for padding. It is the same update as the padded form where
the model lets no sample see another: positions begin anew at each sample, and attention stays inside of it.
A loss that shifts takes no label across, because the label at the first token of each sample is ignored.

``samples.py`` makes the row and cuts it again, ``attention.py`` has such an attention.
"""

from wholebatch.rows.attention import RowLayout as RowLayout
from wholebatch.rows.attention import attend_in_rows as attend_in_rows
from wholebatch.rows.attention import row_layout as row_layout
from wholebatch.rows.samples import join_samples as join_samples
from wholebatch.rows.samples import pack_rows as pack_rows
from wholebatch.rows.samples import unpack_rows as unpack_rows
