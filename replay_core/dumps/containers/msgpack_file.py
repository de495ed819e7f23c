"""msgpack: one value, decoded without any type of its writer's."""

from __future__ import annotations

from typing import Any

from replay_core.dumps.containers.loading import Loading

#: msgpack is read whole; no transport batch comes near this.
MAX_BYTES = 1 << 30


def read_msgpack(loading: Loading) -> Any:
    """The file's one value.

    Raises:
        DumpError: it is no msgpack, or nested deeper than any batch.
    """
    import msgspec  # 10 ms; opening by names decodes nothing

    region = loading.region
    size = region.end - region.start
    if size > MAX_BYTES:
        raise loading.malformed("the msgpack file is too large to read whole", expected=f"at most {MAX_BYTES:,} bytes")
    try:
        tree = msgspec.msgpack.decode(region.read(region.start, size))
    except RecursionError:
        raise loading.malformed("the msgpack value is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise loading.malformed(f"the file is no msgpack: {error}", expected="one msgpack value") from None
    if not isinstance(tree, (dict, list)):
        found = type(tree).__name__
        raise loading.malformed("the file holds a single value", expected="a list or mapping", found=found)
    return tree
