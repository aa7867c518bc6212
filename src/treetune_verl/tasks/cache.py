"""Cache keys and locations."""

from treetune.data.rows.cache import Cache, config_hash, impl_hash
from treetune.system.folders import default_cache_dir

__all__ = ["Cache", "config_hash", "default_cache_dir", "impl_hash"]
