"""`--part i/n`: one of n parts of a dataset, by sample id. n runs, on any hosts, write their parts into one store."""

from __future__ import annotations

from dataclasses import dataclass

from eyas.base.errors import InputError


@dataclass(frozen=True)
class Part:
    """The `index`-th (from 0) of `of` parts; `Part()` is the whole."""

    index: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Part:
        """`i/n`, or None for the whole. Raises InputError for anything else than 0 <= i < n."""
        if text is None:
            return cls()
        left, _, right = text.partition("/")
        if not (left.isdigit() and right.isdigit() and int(left) < int(right)):
            raise InputError(
                f"--part {text} is not i/n with 0 <= i < n", "for example --part 0/4 on the first of 4 hosts"
            )
        return cls(int(left), int(right))

    @property
    def name(self) -> str:
        """`s003` of `3/8`, in the names of the files that it writes; empty for the whole."""
        return f"s{self.index:03d}" if self.of > 1 else ""

    def holds(self, sample_id: str) -> bool:
        """Whether a sample belongs to it: by its id alone, the same on every host."""
        # The id's last digits; the ranks of one engine divide theirs by CRC-32, and one hash for both would leave ranks idle.
        return self.of == 1 or int(sample_id[-12:], 16) % self.of == self.index


WHOLE = Part()
