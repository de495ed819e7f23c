"""A command whose options stand in sections in its help, with examples below them."""

from __future__ import annotations

from typing import Any

import click


class Sectioned(click.Command):
    """`sections`: title -> names of parameters; options that none names come last, as `Other`. `examples`: lines to
    type.
    """

    def __init__(self, *args: Any, sections: dict[str, tuple[str, ...]], examples: tuple[str, ...], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._sections, self._examples = sections, examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The sections in their order."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        told = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([told.pop(name) for name in names])
        with formatter.section("Other"):
            formatter.write_dl(list(told.values()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples."""
        with formatter.section("Examples"):
            for line in self._examples:
                formatter.write(f"  {line}\n")
