"""The samples of ``wholebatch train`` and what is learned of them."""

from wholebatch.train.data.loaded import load_data as load_data
