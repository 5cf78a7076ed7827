"""A service that stands by, when the lock of the data folder is removed while it waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pantheraml.service.app import STANDBY_SECONDS, preparation
from pantheraml.service.settings import Settings


def test_the_lock_of_a_removed_file_is_none(tmp_path: Path) -> None:
    """The third service would start, and so would the second when the first ends: two on one folder."""
    settings = Settings(tmp_path / "data", tmp_path, cpu_slots=1)
    told: list[str] = []

    async def stand_by() -> None:
        async with preparation(replace(settings, standby=True)):
            told.append("second")

    async def check() -> None:
        async with preparation(settings):
            waiting = asyncio.create_task(stand_by())
            await asyncio.sleep(2 * STANDBY_SECONDS)
            (settings.data_dir / "service.lock").unlink()
            third = preparation(settings)
            await third.__aenter__()
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 4 * STANDBY_SECONDS)
            assert told == []
        finally:
            await third.__aexit__(None, None, None)
        await asyncio.wait_for(waiting, 20)
        assert told == ["second"]

    asyncio.run(check())
