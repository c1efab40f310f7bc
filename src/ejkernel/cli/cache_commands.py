# SPDX-License-Identifier: Apache-2.0
"""Options and help of `ejkernel cache`. This module does not import JAX."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import click

from ejkernel.cli.commands import FOLDER, Group, as_json, imports, read_cache

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

written_cache = click.option("--cache", type=FOLDER, help="Folder to change; EJKERNEL_CACHE_DIR by default.")
dry_run = click.option("--dry-run", is_flag=True, help="Only print what would be removed.")


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime.timedelta | None:
    """Return the duration of a text like `30d`."""
    del ctx, param
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,6})([mhdw])", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r} is not a duration like 90m, 12h, 30d or 8w.")
    return datetime.timedelta(**{_UNITS[match[2]]: int(match[1])})


older_than = click.option(
    "--older-than", callback=_age, metavar="AGE", help="Only files older than this: 90m, 12h, 30d, 8w."
)


@click.group(cls=Group)
def cache() -> None:
    """Show, check, clean and share the folder of saved configurations.

    Programs read and write one folder, EJKERNEL_CACHE_DIR or ~/.cache/ejkernel/configs. EJKERNEL_CACHE_LAYERS lists
    further folders and URLs, separated by commas. Programs read them for calls that the folder lacks, and never write
    to them.
    """


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def path(as_json: bool) -> int:
    """Print the folder of saved configurations."""
    import json

    from ejkernel import settings

    try:
        folder = settings.current().cache_dir
    except RuntimeError as error:  # e.g. a container user without a home folder
        raise click.ClickException("the user has no home folder; set EJKERNEL_CACHE_DIR.") from error
    click.echo(json.dumps({"path": str(folder), "exists": folder.is_dir()}) if as_json else str(folder))
    return 0


@cache.command("list")
@read_cache
@as_json
def list_(cache: Path | None, as_json: bool) -> int:
    """List the saved configurations, like `ejkernel show`."""
    from ejkernel.cli.show import run_show

    return run_show(cache, as_json)


@cache.command()
@click.argument("prefix")
@read_cache
@as_json
def show(prefix: str, cache: Path | None, as_json: bool) -> int:
    """Print the full entries of some calls.

    PREFIX is the start of their key or of the name of their operation.
    """
    from ejkernel.cli.show import run_show_entries

    run_show_entries(cache, prefix, as_json)
    return 0


@cache.command()
@imports
@read_cache
@as_json
def verify(imports: tuple[str, ...], cache: Path | None, as_json: bool) -> int:
    """Read every file and report unusable ones with the reason.

    Without --cache, the folders of EJKERNEL_CACHE_LAYERS are read too. Also reports entries measured with other
    versions. With --import, it also reports entries of that module's kernels that do not run, or that are older than a
    change of the search space or heuristic. The exit status is 1 if a file is unusable, a folder of
    EJKERNEL_CACHE_LAYERS is missing, or a folder is above or inside a cache folder.
    """
    from ejkernel.cli.folder import run_verify

    return run_verify(cache, imports, as_json=as_json)


@cache.command()
@click.argument("url", required=False, default="")
@written_cache
@older_than
@click.option("--not-for-this-jax", "other_jax", is_flag=True, help="Only files measured with another version of JAX.")
@click.option("--failed", is_flag=True, help="Only searches in which nothing could be measured.")
@click.option("--unreadable", is_flag=True, help="Unusable files, of any age.")
@dry_run
@as_json
def prune(url: str, cache: Path | None, dry_run: bool, as_json: bool, **wanted: Any) -> int:
    """Remove some of the saved configurations, searches and notes.

    With several of --older-than, --not-for-this-jax and --failed, a removed file meets all of them. Later searches
    start from saved searches, and `tune --missed` tunes the calls in notes. A file that another process replaces
    during the command stays.

    With URL, the command removes entries of that shared cache instead of the folder, and also every entry that is worse
    than another. Readable entries of a damaged object stay. Other users may push at the same time.
    """
    if not url and all(value in (None, False) for value in wanted.values()):  # an age of 0 is false
        raise click.UsageError(
            "choose the files to remove: --older-than, --not-for-this-jax, --failed or --unreadable."
        )
    if url and wanted["failed"]:
        raise click.UsageError("--failed is about searches, which are not uploaded to a shared cache.")
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
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@dry_run
@as_json
def clear(cache: Path | None, older_than: datetime.timedelta | None, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Remove all saved configurations, searches and notes.

    Other files in the folder stay, as do files that other processes save during the command.
    """
    from ejkernel.cli.folder import run_clear

    return run_clear(cache, yes=yes, dry_run=dry_run, as_json=as_json, older_than=older_than)


dry_exchange = click.option("--dry-run", is_flag=True, help="Only print what would be done.")


@cache.command()
@click.argument("url", required=False, default="")
@read_cache
@click.option("--merge", is_flag=True, help="Afterwards merge the small objects of the shared cache into one.")
@dry_exchange
@as_json
def push(url: str, cache: Path | None, merge: bool, dry_run: bool, as_json: bool) -> int:
    """Upload saved configurations to the shared cache at URL.

    URL is an fsspec URL, e.g. s3://bucket/prefix, gs://bucket/prefix or file:///shared/folder; by default the only URL
    in EJKERNEL_CACHE_LAYERS. Better entries of the shared cache stay, and entries pushed by other users are never lost.
    To copy to a folder, use `ejkernel cache merge`.
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
    """Copy better entries from the shared cache at URL.

    Without URL, update the local copies of the URLs in EJKERNEL_CACHE_LAYERS, as the first miss does.
    """
    if dry_run and not url:
        raise click.UsageError("--dry-run requires a URL.")
    from ejkernel.cli.sharing import run_pull

    run_pull(url, cache, dry_run=dry_run, as_json=as_json)
    return 0


@cache.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@written_cache
@dry_exchange
@as_json
def merge(sources: tuple[str, ...], cache: Path | None, dry_run: bool, as_json: bool) -> int:
    """Copy better entries and searches into the cache folder.

    Entries come from folders and URLs, searches from folders. Of two entries measured with the same versions, the
    greater speed-up over the heuristic wins; otherwise the entry measured with the versions here, or else the newer
    one. Entries set by hand always stay. If neither of two configurations is known to be better, both are listed as a
    conflict.
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
    """List the differences between two folders or URLs.

    The table names the better entry of each pair. LEFT is the cache folder by default. The exit status is 1 if they
    differ.
    """
    from ejkernel.cli.sharing import run_diff

    return run_diff(right, left, cache, as_json=as_json)
