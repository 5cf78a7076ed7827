"""Pages of a list in the order of creation, with the last item's id as the cursor, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy import Select, and_, or_
from sqlalchemy.ext.asyncio import AsyncSession

Row = TypeVar("Row")


@dataclass(frozen=True)
class PageOfRows(Generic[Row]):
    rows: list[Row]
    has_more: bool

    def as_list(self, show: Callable[[Row], dict[str, Any]]) -> dict[str, Any]:
        """Return OpenAI's list object; `show` converts a row."""
        data = [show(row) for row in self.rows]
        ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
        return {"object": "list", "data": data, "has_more": self.has_more, **ends}


async def fetch_page(
    session: AsyncSession,
    query: Select[Any],
    table: Any,
    *,
    limit: int,
    cursor: Any | None,
    order: Literal["asc", "desc"] = "desc",
) -> PageOfRows[Any]:
    """`cursor`: the row after which the page begins; None: from the start."""
    moment, name = table.created_at, table.id
    if cursor is not None:
        if order == "desc":
            later = or_(moment < cursor.created_at, and_(moment == cursor.created_at, name < cursor.id))
        else:
            later = or_(moment > cursor.created_at, and_(moment == cursor.created_at, name > cursor.id))
        query = query.where(later)
    columns = (moment.desc(), name.desc()) if order == "desc" else (moment.asc(), name.asc())
    rows = list((await session.scalars(query.order_by(*columns).limit(limit + 1))).all())
    return PageOfRows(rows[:limit], len(rows) > limit)
