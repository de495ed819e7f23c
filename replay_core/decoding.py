"""Token ids as text, where a tokenizer.json is named or lies beside the dump. Nothing is downloaded or run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from replay_core.errors import RequestError

FILE = "tokenizer.json"
#: The largest published ones are a tenth of this.
MAX_BYTES = 1 << 28
#: Folders above the dump in which a trainer leaves its tokenizer.
_PARENTS = 2


def find_tokenizer(path: Path, known: Iterable[str] = ()) -> Path | None:
    """The tokenizer.json of a dump: of the weights it names, inside it, or in the folders just above."""
    folders = [Path(one) for one in known]
    here = path if path.is_dir() else path.parent
    folders += [here, *here.absolute().parents[:_PARENTS]]
    for folder in folders:
        for candidate in (folder / FILE, folder / "tokenizer" / FILE):
            try:
                if candidate.is_file():
                    return candidate
            except OSError:
                continue
    return None


def texts_near(ids: Sequence[int | None], path: Path, known: Iterable[str] = ()) -> list[str | None] | None:
    """Each id as text by the tokenizer of a dump, None where there is no id; None where no tokenizer can be used."""
    found = find_tokenizer(path, known)
    if found is None:
        return None
    try:
        return [piece or None for piece in Decoder(found).pieces([-1 if one is None else one for one in ids])]
    except RequestError:
        return None


class Decoder:
    """A tokenizer that only decodes."""

    def __init__(self, path: Path) -> None:
        """Raises:
        RequestError: there is no such file, or it is no tokenizer.
        """
        from tokenizers import Tokenizer  # 20 ms, and only who looks at text pays

        self.path = path / FILE if path.is_dir() else path
        try:
            size = self.path.stat().st_size
            if size > MAX_BYTES:
                raise RequestError("the tokenizer is too large", file=str(self.path), found=f"{size:,} bytes")
            self._tokenizer: Any = Tokenizer.from_file(str(self.path))
        except OSError as error:
            raise RequestError(f"there is no tokenizer: {error.strerror}", file=str(self.path)) from None
        except RequestError:
            raise
        except BaseException as error:
            # The library reports every damage as a bare Exception, or as a panic that is none.
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise RequestError(f"the file is no tokenizer: {error}", file=str(self.path)) from None

    def text(self, ids: Sequence[int]) -> str:
        """The ids as one text, special tokens shown."""
        return str(self._tokenizer.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each id by itself."""
        return [self.text([i]) if 0 <= i < 2**32 else "" for i in ids]
