# SPDX-License-Identifier: Apache-2.0
"""`ejkernel cache`, as it is typed. Nothing here imports JAX."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import click

from ejkernel.cli.commands import FOLDER, as_json, imports, read_cache
from ejkernel.cli.group import Group

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

written_cache = click.option("--cache", type=FOLDER, help="Folder to change; EJKERNEL_CACHE_DIR by default.")
dry_run = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime.timedelta | None:
    """Return the length of time that is written."""
    del ctx, param
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([mhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is no length of time such as 90m, 12h, 30d or 8w.")
    return datetime.timedelta(**{_UNITS[match[2]]: int(match[1])})


older_than = click.option(
    "--older-than", callback=_age, metavar="AGE", help="Only what is older than this: 90m, 12h, 30d, 8w."
)


@click.group(cls=Group)
def cache() -> None:
    """See, check and tidy the folder of saved configurations."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def path(as_json: bool) -> int:
    """Print the folder that configurations are saved in."""
    from ejkernel import settings

    try:
        folder = settings.current().cache_dir
    except RuntimeError as error:  # a container's user without a home
        raise click.ClickException("there is no home folder to keep it in; set EJKERNEL_CACHE_DIR.") from error
    click.echo(json.dumps({"path": str(folder), "exists": folder.is_dir()}) if as_json else str(folder))
    return 0


@cache.command("list")
@read_cache
@as_json
def list_(cache: Path | None, as_json: bool) -> int:
    """List the configurations that were saved, as `ejkernel show` does."""
    from ejkernel.cli.show import run_show

    return run_show(cache, as_json)


@cache.command()
@click.argument("prefix")
@read_cache
@as_json
def show(prefix: str, cache: Path | None, as_json: bool) -> int:
    """Print all that is saved of some calls.

    PREFIX is how their key, or the name of their operation, begins.
    """
    from ejkernel.cli.show import run_show_entries

    run_show_entries(cache, prefix, as_json)
    return 0


@cache.command()
@imports
@read_cache
@as_json
def verify(imports: tuple[str, ...], cache: Path | None, as_json: bool) -> int:
    """Read every file, and say which cannot be used and why.

    It also says what was measured with other versions; with --import, of which entries the kernels of that module would
    be tuned among other configurations now. The exit status is 1 if a file cannot be used.
    """
    from ejkernel.cli.folder import run_verify

    return run_verify(cache, imports, as_json=as_json)


@cache.command()
@click.argument("url", required=False, default="")
@written_cache
@older_than
@click.option(
    "--not-for-this-jax", "other_jax", is_flag=True, help="Only what was measured with another version of JAX."
)
@click.option("--unreadable", is_flag=True, help="Files that cannot be used, whatever their age.")
@dry_run
@as_json
def prune(url: str, cache: Path | None, dry_run: bool, as_json: bool, **wanted: Any) -> int:
    """Remove some of the saved configurations, searches and notes.

    What is removed meets both --older-than and --not-for-this-jax, where both are given. Searches are what later ones
    start from, and notes are what `tune --missed` tunes. A file that another process replaces meanwhile stays.

    With URL, entries of that shared cache are removed, and not of the folder: those, and in any case all that are worse
    than others there. What is whole of an object that cannot be read stays. Others may push meanwhile.
    """
    if not url and not any(wanted.values()):
        raise click.UsageError("say what to remove: --older-than, --not-for-this-jax or --unreadable.")
    from ejkernel.cli.folder import Wanted, run_prune
    from ejkernel.cli.sharing import run_prune_shared

    if url:
        run_prune_shared(url, cache, Wanted(**wanted), dry_run=dry_run, as_json=as_json)
    else:
        run_prune(cache, Wanted(**wanted), dry_run=dry_run, as_json=as_json)
    return 0


@cache.command()
@written_cache
@older_than
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@dry_run
@as_json
def clear(cache: Path | None, older_than: datetime.timedelta | None, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Remove all saved configurations, searches and notes.

    Nothing else in the folder is touched, nor what other processes save there while the command runs.
    """
    from ejkernel.cli.folder import run_clear

    return run_clear(cache, yes=yes, dry_run=dry_run, as_json=as_json, older_than=older_than)


dry_exchange = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@cache.command()
@click.argument("url", required=False, default="")
@read_cache
@click.option("--merge", is_flag=True, help="Then make one object of the many small ones that are there.")
@dry_exchange
@as_json
def push(url: str, cache: Path | None, merge: bool, dry_run: bool, as_json: bool) -> int:
    """Share what is saved here with those who read URL.

    URL is what fsspec understands, such as s3://bucket/prefix, gs://bucket/prefix or file:///shared/folder; by default
    the one of EJKERNEL_CACHE_LAYERS. Entries that are there and are better stay; nothing that others push is lost.
    """
    from ejkernel.cli.sharing import run_push

    run_push(url, cache, merge=merge, dry_run=dry_run, as_json=as_json)
    return 0


@cache.command()
@click.argument("url", required=False, default="")
@written_cache
@dry_exchange
@as_json
def pull(url: str, cache: Path | None, dry_run: bool, as_json: bool) -> int:
    """Take what is better of what others have shared at URL.

    Without URL, bring the copies of the URLs in EJKERNEL_CACHE_LAYERS up to date, as a first miss does.
    """
    if dry_run and not url:
        raise click.UsageError("--dry-run goes with a URL.")
    from ejkernel.cli.sharing import run_pull

    run_pull(url, cache, dry_run=dry_run, as_json=as_json)
    return 0


@cache.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@written_cache
@dry_exchange
@as_json
def merge(sources: tuple[str, ...], cache: Path | None, dry_run: bool, as_json: bool) -> int:
    """Take what is better of what folders and URLs have.

    Of two entries that were measured with the same versions, the one with the greater speed-up over the heuristic
    stays; of others, the one that was measured with the versions here, or the newer. What was set by hand stays. Where
    nothing tells which of two configurations is the better, both are listed.
    """
    from ejkernel.cli.sharing import run_merge

    run_merge(sources, cache, dry_run=dry_run, as_json=as_json)
    return 0


@cache.command()
@click.argument("right")
@click.argument("left", required=False, default="")
@read_cache
@as_json
def diff(right: str, left: str, cache: Path | None, as_json: bool) -> int:
    """Say in what two folders or URLs differ, and which entry is better.

    LEFT is the cache's own folder by default. The exit status is 1 if there is a difference.
    """
    from ejkernel.cli.sharing import run_diff

    return run_diff(right, left, cache, as_json=as_json)
