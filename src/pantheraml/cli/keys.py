"""`pantheraml keys create|list|revoke`: API keys of the service."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError
from pantheraml.base.text import printable
from pantheraml.cli.serve import add_data_options, checked_database_url, require_service

if TYPE_CHECKING:
    from pantheraml.service.key_admin import KeyInfo

DAY = 24 * 3600.0


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "keys", help="API keys of the service", description="Create, list and revoke API keys of the service."
    )
    actions = parser.add_subparsers(dest="action", metavar="create|list|revoke", required=True, help="what to do")
    create = actions.add_parser("create", help="create a key and print it; it is shown only once")
    create.add_argument("user", metavar="USER", help="whose files and jobs it is for")
    create.add_argument("--scope", choices=["read", "submit", "admin"], default="submit", help="rights (submit)")
    create.add_argument("--days", type=float, metavar="N", help="days until it expires (never)")
    revoke = actions.add_parser("revoke", help="revoke a key, at once and for good")
    revoke.add_argument("key_id", metavar="KEY_ID", help="id of the key, as `list` shows it")
    for action in (create, actions.add_parser("list", help="list the keys"), revoke):
        add_data_options(action)
        action.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    require_service()
    from pantheraml.service import key_admin
    from pantheraml.service.settings import Settings

    settings = Settings(
        Path(arguments.data_dir), Path("models"), database_url=checked_database_url(arguments.database_url)
    )
    if arguments.action == "create":
        if arguments.days is not None and not 0 < arguments.days < math.inf:  # NaN is neither
            raise ConfigError("--days must be a positive number.", fix="Leave it out for a key that does not expire.")
        expires = None if arguments.days is None else time.time() + arguments.days * DAY
        info, text = key_admin.create(settings, arguments.user, arguments.scope, expires)
        print(json.dumps({**info.model_dump(), "key": text}) if arguments.json else text)
        return 0
    keys = key_admin.list_all(settings) if arguments.action == "list" else []
    if arguments.action == "revoke":
        keys = [key_admin.revoke(settings, arguments.key_id)]
    if arguments.json:
        print(json.dumps([key.model_dump() for key in keys], indent=1))
        return 0
    for key in keys:
        print(_line(key))
    return 0


def _line(key: KeyInfo) -> str:
    scope = next(scope for scope in ("admin", "submit", "read") if scope in key.scopes)
    return f"{key.id}  {printable(key.user):<20}  {scope:<6}  {key.status}"
