"""Hidden states on disk: what a store holds, writing it from where states are computed, reading it back by sample."""

from eyas.store.format import (
    DTYPES,
    STORE_DTYPES,
    ShardHeader,
    StoreSpec,
    done_samples,
    finished_shards,
    read_shard_header,
    read_store_manifest,
    write_store_manifest,
)
from eyas.store.reader import States, StateSample, open_states
from eyas.store.writer import ShardWriter

__all__ = [
    "DTYPES",
    "STORE_DTYPES",
    "ShardHeader",
    "ShardWriter",
    "StateSample",
    "States",
    "StoreSpec",
    "done_samples",
    "finished_shards",
    "open_states",
    "read_shard_header",
    "read_store_manifest",
    "write_store_manifest",
]
