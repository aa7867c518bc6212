"""Cache keys and locations."""

from treetune.data.rows.cache import Cache, config_hash, default_cache_dir, impl_hash

__all__ = ["Cache", "config_hash", "default_cache_dir", "impl_hash"]
