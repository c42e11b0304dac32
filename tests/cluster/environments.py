"""An environment whose episodes take time without computing, so that a run lasts long enough to be disturbed."""

import asyncio

from tests.end_to_end.environments import Letters


class SlowLetters(Letters):
    async def run(self, task, context):
        await asyncio.sleep(1.5)
        return await super().run(task, context)
