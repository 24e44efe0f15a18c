"""The openai package: completions, streams, errors."""

import asyncio
import time

import openai

KEY = "client-key"


def client(url, key=KEY):
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60)


def model(url):
    return client(url).models.list().data[0].id


def raises(kind, fn):
    try:
        fn()
    except kind as e:
        return e
    raise AssertionError(f"no {kind.__name__}")


def test_models(url):
    m = client(url).models.list().data[0]
    assert m.max_model_len == 512 and m.owned_by == "lockstep", m


def test_text(url):
    r = client(url).completions.create(model=model(url), prompt="hello", max_tokens=8, temperature=0)
    c = r.choices[0]
    assert r.object == "text_completion" and r.id.startswith("cmpl-"), r
    assert c.finish_reason == "length" and isinstance(c.text, str), c
    assert r.usage.completion_tokens == 8 and r.usage.total_tokens == r.usage.prompt_tokens + 8
    assert c.weight_versions == [{"version": "default", "epoch": 0, "start": 0, "end": 8}], c


def test_several_prompts_and_choices(url):
    r = client(url).completions.create(
        model=model(url), prompt=[[1, 2, 3], [4, 5]], n=2, seed=7, max_tokens=4, logprobs=2,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True})
    assert [c.index for c in r.choices] == [0, 1, 2, 3]
    assert r.choices[2].prompt_token_ids == [4, 5]
    for c in r.choices:
        lp = c.logprobs
        assert len(c.token_ids) == len(lp.tokens) == len(lp.token_logprobs) == 4
        assert all(1 <= len(t) <= 3 for t in lp.top_logprobs), lp.top_logprobs
        assert lp.tokens == [f"token_id:{i}" for i in c.token_ids]
        assert all(x <= 0 for x in lp.token_logprobs)


def test_seed(url):
    def ids(seed):
        r = client(url).completions.create(
            model=model(url), prompt=[9, 9, 9], seed=seed, max_tokens=16,
            extra_body={"return_token_ids": True})
        return r.choices[0].token_ids

    assert ids(5) == ids(5)


def test_stream(url):
    args = {"model": model(url), "prompt": "stream me", "max_tokens": 24, "temperature": 0}
    whole = client(url).completions.create(**args)
    text, usage, finish, chunks = "", None, None, 0
    for e in client(url).completions.create(
            stream=True, stream_options={"include_usage": True}, **args):
        chunks += 1
        if e.choices:
            text += e.choices[0].text
            finish = e.choices[0].finish_reason or finish
        else:
            usage = e.usage
    assert text == whole.choices[0].text and finish == "length"
    assert usage.completion_tokens == 24 and chunks > 3


def open_requests(url):
    import urllib.request
    with urllib.request.urlopen(url + "/metrics") as r:
        lines = r.read().decode().splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("lockstep:open_requests{"))


def test_closed_stream_frees_the_engine(url):
    stream = client(url).completions.create(
        model=model(url), prompt=[1] * 8, max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while open_requests(url) > 0:
        assert time.monotonic() < deadline, "the request goes on without its client"
        time.sleep(0.02)


def test_async(url):
    async def run():
        c = openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0, timeout=60)
        name = (await c.models.list()).data[0].id
        rs = await asyncio.gather(*(
            c.completions.create(model=name, prompt=[i, 1], max_tokens=8) for i in range(32)))
        assert all(r.usage.completion_tokens == 8 for r in rs)

    asyncio.run(run())


def test_errors(url):
    c, m = client(url), model(url)
    e = raises(openai.BadRequestError,
               lambda: c.completions.create(model=m, prompt="x", temperature=-1))
    assert e.param == "temperature" and e.code == "400", (e.param, e.code)
    assert "temperature must be" in e.message, e.message
    raises(openai.BadRequestError, lambda: c.completions.create(model=m, prompt=[1] * 600))
    raises(openai.BadRequestError, lambda: c.completions.create(model=m, prompt=[10**6]))
    raises(openai.BadRequestError,
           lambda: c.completions.create(model=m, prompt="x", stream=True, max_tokens=0))
    raises(openai.NotFoundError, lambda: c.completions.create(model="other", prompt="x"))
    raises(openai.AuthenticationError,
           lambda: client(url, "wrong").completions.create(model=m, prompt="x"))
    raises(openai.NotFoundError, lambda: c.embeddings.create(model=m, input="x"))
