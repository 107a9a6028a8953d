"""``kimigraph cache``."""

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import fail, reports_errors
from kimigraph.cli.options import Out, with_compile_options
from kimigraph.ir import env
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CorruptArtifactError, UsageError
from kimigraph.ir.sizes import format_bytes, parse_bytes

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
SHORT_KEY = 12
MOST_VALUE = 60


def make_group() -> typer.Typer:
    """The group with its commands."""
    group = typer.Typer(
        help="Look into the compile cache, and keep it small.", no_args_is_help=True, rich_markup_mode=None
    )
    commands: dict[str, Callable[..., None]] = {
        "list": _list,
        "show": _show,
        "why": with_compile_options(_why),
        "verify": _verify,
        "prune": _prune,
        "clear": _clear,
        "path": _path,
    }
    for name, command in commands.items():
        group.command(name)(reports_errors(command))
    return group


def _place() -> Any:
    """The cache's place; UsageError for one that belongs to somebody else."""
    from kimigraph.runtime.cache import Place, default_root

    place = Place(default_root())
    if place.distrust():
        raise UsageError(place.distrust())
    return place


def _list(as_json: AsJson = False) -> None:
    """List the entries, the one used last first."""
    from kimigraph.runtime.cache.listing import list_entries

    entries = list_entries(_place())
    if as_json:
        print_json(entries)
        return
    rows = [
        (
            entry["key"][:SHORT_KEY],
            _age(entry["last_used"]),
            format_bytes(entry["size"]),
            entry.get("target", ""),
            f"{entry.get('model', '')} {entry.get('shape', '')}" if entry["readable"] else "unreadable",
        )
        for entry in entries
    ]
    if rows:
        print_columns([("key", "used", "size", "target", "program"), *rows])
    typer.echo(f"{len(entries)} entries, {format_bytes(sum(entry['size'] for entry in entries))}")


def _show(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of an entry, or its beginning.")],
    as_json: AsJson = False,
) -> None:
    """Show what an entry was compiled from, its files and its report."""
    from kimigraph.runtime.cache.listing import show_entry

    entry = show_entry(_place(), key)
    if as_json:
        print_json(entry)
        return
    names = ("key", "model", "shape", "target", "directory")
    print_columns(
        [(name, str(entry[name])) for name in names if name in entry] + [("size", format_bytes(entry["size"]))]
    )
    typer.echo("components of the key")
    print_columns([(name, _value(value)) for name, value in entry["components"].items()], indent=2)
    typer.echo("files")
    print_columns([(item["path"], format_bytes(item["size"])) for item in entry["files"]], indent=2)


def _why(source: str, config: CompileConfig, out: Out, as_json: bool) -> None:
    """Say whether compiling SOURCE would hit, and if not, in what it differs from the nearest entry.

    Takes the options of compile, and compiles nothing.

    \b
      kimigraph cache why examples/k31_tiny --batch 2 --target cpu:reference
    """
    del out
    if config.target == "cpu":
        env.enable_interpreter()  # before the first import of triton, which the next line may bring
    with progress() as notify:
        from kimigraph.tools.cache_why import why

        document = why(source, config, notify)
    if as_json:
        print_json(document)
        return
    typer.echo(f"{document['status']}: {document['reason'] or document['graph_key']}")
    rows = [
        (item["component"], f"{_value(item['stored'])} there, {_value(item['asked'])} here")
        for item in document["differences"]
    ]
    if rows:
        typer.echo(f"nearest entry: {document['nearest'][:SHORT_KEY]}")
        print_columns(rows, indent=2)


def _verify(as_json: AsJson = False) -> None:
    """Read every byte of every entry; exit with 5 when one is not what was stored."""
    from kimigraph.runtime.cache.listing import verify_entries

    document = verify_entries(_place())
    if as_json:
        print_json(document)
    else:
        typer.echo(f"{document['root']}: {document['checked']} entries checked")
        print_columns([("corrupt", item["key"][:SHORT_KEY], item["reason"]) for item in document["corrupt"]], indent=2)
        print_columns([("not the cache's", name) for name in document["foreign"]], indent=2)
    if document["corrupt"]:
        count = len(document["corrupt"])
        fail(
            f"error: {count} corrupt: the next compilation that meets one sets it aside; "
            "`kimigraph cache clear` removes all",
            CorruptArtifactError.exit_code,
        )


def _prune(
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bytes to keep at most, such as 500M. [default: the cache's limit]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the entries unused for longest until the rest fits."""
    from kimigraph.runtime.cache.eviction import DEFAULT_LIMIT
    from kimigraph.runtime.cache.listing import prune_entries

    limit = parse_bytes(max_size) if max_size is not None else env.cache_limit() or DEFAULT_LIMIT
    document = prune_entries(_place(), limit)
    if as_json:
        print_json(document)
    else:
        typer.echo(f"removed {len(document['removed'])} entries, {format_bytes(document['freed'])}")
        typer.echo(f"{document['entries']} left, {format_bytes(document['size'])} of {format_bytes(limit)}")


def _clear(as_json: AsJson = False) -> None:
    """Remove all that the cache wrote."""
    from kimigraph.runtime.cache.listing import clear_cache

    document = clear_cache(_place())
    if as_json:
        print_json(document)
    else:
        typer.echo(f"removed {document['removed']} entries, {format_bytes(document['freed'])}")


def _path(as_json: AsJson = False) -> None:
    """Print where the cache lies (KIMIGRAPH_CACHE_DIR sets it)."""
    from kimigraph.runtime.cache import default_root

    if as_json:
        print_json({"path": str(default_root())})
    else:
        typer.echo(default_root())


def _age(then: float) -> str:
    seconds = max(time.time() - then, 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "now"


def _value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MOST_VALUE else f"{text[:MOST_VALUE]}..."
