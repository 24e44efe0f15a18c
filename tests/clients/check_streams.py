"""256 streams at once over one event loop (aiohttp), with a pause in the middle."""

import asyncio
import json

import aiohttp

N = 256
TOKENS = 96
API = {"Authorization": "Bearer client-key"}
ADMIN = {"Authorization": "Bearer admin-key"}


async def events(response):
    """The events of a stream, decoded; checks that it ends with [DONE]."""
    done = False
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        assert not done or line == "", line
        if line.startswith("data: "):
            if line == "data: [DONE]":
                done = True
            else:
                yield json.loads(line[6:])
        else:
            assert line == "" or line.startswith(":"), line
    assert done, "the stream was cut"


async def one(session, url, i, started):
    generate = i % 2 == 0
    pair = i // 4  # two of each kind have the same prompt and seed
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "seed": pair, "ignore_eos": True}
    prompt = [1 + pair % 50, 2, 3]
    if generate:
        path = "/inference/v1/generate"
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
    else:
        path = "/v1/completions"
        body = {"prompt": prompt, "stream": True, "return_token_ids": True, **sampling}
    ids, spans, finish = [], None, None
    headers = {**API, "X-Session-ID": f"s{pair}"}
    async with session.post(url + path, json=body, headers=headers) as r:
        assert r.status == 200, await r.text()
        assert r.headers["Content-Type"].startswith("text/event-stream")
        async for e in events(r):
            assert "error" not in e, e
            c = e["choices"][0]
            ids += c["token_ids"]
            if len(ids) > 2:
                started.add(i)
            finish = c["finish_reason"] or finish
            spans = c.get("weight_versions", spans)
    assert finish == "length" and len(ids) == TOKENS, (finish, len(ids))
    assert spans[0]["start"] == 0 and spans[-1]["end"] == TOKENS, spans
    return generate, pair, ids


async def metric(session, url, name):
    async with session.get(url + "/metrics") as r:
        text = await r.text()
    return sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith(name + "{"))


async def control(session, url, path):
    async with session.post(url + path, headers=ADMIN) as r:
        assert r.status == 200, await r.text()


async def run(url):
    timeout = aiohttp.ClientTimeout(total=180)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        before = await metric(session, url, "vllm:e2e_request_latency_seconds_count")
        await control(session, url, "/pause?mode=keep")  # so that all are open at once
        started = set()
        tasks = [asyncio.create_task(one(session, url, i, started)) for i in range(N)]
        while await metric(session, url, "lockstep:open_requests") < N:
            await asyncio.sleep(0.02)
            failed = [t for t in tasks if t.done()]
            assert not failed, failed[0].result()
        assert not started
        await control(session, url, "/resume")
        while not started:  # streams are in full flow; now stop them where they are
            await asyncio.sleep(0.001)
        await control(session, url, "/pause?mode=keep&clear_cache=false")
        await control(session, url, "/resume")
        results = await asyncio.gather(*tasks)
        by_seed = {}
        for _, pair, ids in results:  # both routes, whatever else ran beside them
            assert by_seed.setdefault(pair, ids) == ids, f"seed {pair} gave two results"
        after = await metric(session, url, "vllm:e2e_request_latency_seconds_count")
        assert after - before == N, (before, after)


def test_256_streams_over_a_pause(url):
    asyncio.run(run(url))
