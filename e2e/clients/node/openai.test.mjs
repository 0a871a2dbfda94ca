// Perdure as the official npm client sees it. The Go test beside this folder
// starts the servers and names them in the environment.
import test from 'node:test';
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const { PERDURE_URL, PERDURE_BUSY_URL, PERDURE_AUTH_URL, PERDURE_AUTH_KEY } = process.env;
const mockText = 'Durable turns stream one token at a time ';
const patience = 15_000;

const client = (url = PERDURE_URL, more = {}) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0, timeout: patience, ...more });
const ask = (model, content, more = {}) => ({ model, messages: [{ role: 'user', content }], ...more });
const inSession = (id, more = {}) => ({ headers: { 'X-Perdure-Session': id }, ...more });

async function transcript(id) {
  const res = await fetch(`${PERDURE_URL}/v1/sessions/${id}/messages`);
  assert.equal(res.status, 200);
  return (await res.json()).messages;
}

async function eventually(what, ok) {
  const deadline = Date.now() + patience;
  while (!(await ok())) {
    assert.ok(Date.now() < deadline, `did not come within ${patience} ms: ${what}`);
    await new Promise((resolve) => setImmediate(resolve));
  }
}

// refused fails unless the call ends with that class of the client's errors.
async function refused(call, kind, status) {
  const err = await call.then(() => assert.fail(`no error, want ${kind.name}`), (e) => e);
  assert.ok(err instanceof kind, `want ${kind.name}, got ${err?.constructor?.name}: ${err}`);
  assert.ok(err instanceof OpenAI.APIError);
  assert.equal(err.status, status);
  assert.ok(err.message.length > 0 && err.type, `an error without words or type: ${JSON.stringify(err.error)}`);
  return err;
}

test('a chat completion, whole', async () => {
  const res = await client().chat.completions.create(ask('helper', 'Hello'));
  assert.equal(res.object, 'chat.completion');
  assert.equal(res.model, 'helper');
  assert.equal(res.choices[0].message.role, 'assistant');
  assert.equal(res.choices[0].message.content, mockText);
  assert.equal(res.choices[0].finish_reason, 'stop');
  assert.equal(res.usage.completion_tokens, 8);
  assert.equal(res.usage.total_tokens, res.usage.prompt_tokens + 8);
});

test('a chat completion, streamed', async () => {
  const stream = await client().chat.completions.create(ask('helper', 'Hello', { stream: true, stream_options: { include_usage: true } }));
  let text = '', chunks = 0, finish, usage;
  for await (const chunk of stream) {
    chunks++;
    assert.equal(chunk.object, 'chat.completion.chunk');
    text += chunk.choices[0]?.delta?.content ?? '';
    finish = chunk.choices[0]?.finish_reason ?? finish;
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, mockText);
  assert.equal(finish, 'stop');
  assert.equal(usage.completion_tokens, 8);
  assert.ok(chunks >= 4, `role, text, end and usage in ${chunks} chunks`);
});

test('the stream helper with its events', async () => {
  const runner = client().chat.completions.stream(ask('helper', 'Hello'));
  let live = '';
  runner.on('content', (delta) => { live += delta; });
  const final = await runner.finalChatCompletion();
  assert.equal(live, mockText);
  assert.equal(final.choices[0].message.content, mockText);
});

test('models', async () => {
  const ids = [];
  for await (const m of client().models.list()) ids.push(m.id);
  assert.deepEqual(ids, ['demo', 'forecaster', 'helper', 'holder', 'waiter']);
  assert.equal((await client().models.retrieve('helper')).id, 'helper');
  await refused(client().models.retrieve('gpt-9'), OpenAI.NotFoundError, 404);
});

test('a session by header', async () => {
  const first = await client().chat.completions.create(ask('demo', 'My name is Ada.'), inSession('node-talk'));
  const { data, response } = await client().chat.completions.create(ask('demo', 'And now?'), inSession('node-talk')).withResponse();
  assert.equal(response.headers.get('x-perdure-session'), 'node-talk');
  assert.match(response.headers.get('x-perdure-turn'), /./);
  assert.match(data.choices[0].message.content, /turn 2/);
  const texts = (await transcript('node-talk')).map((m) => m.message.content);
  assert.deepEqual(texts, ['My name is Ada.', first.choices[0].message.content, 'And now?', data.choices[0].message.content]);
});

test('an agent with a tool', async () => {
  const res = await client().chat.completions.create(ask('forecaster', 'How is the weather?'), inSession('node-tools'));
  assert.equal(res.choices[0].message.content, mockText);
  assert.equal(res.choices[0].finish_reason, 'stop');
  assert.equal(res.choices[0].message.tool_calls, undefined);
  const kinds = (await transcript('node-tools')).map((m) => m.message.role);
  assert.deepEqual(kinds, ['user', 'assistant', 'tool', 'assistant']);
  const stream = await client().chat.completions.create(ask('forecaster', 'And now?', { stream: true }), inSession('node-tools'));
  let text = '';
  for await (const chunk of stream) {
    assert.equal(chunk.choices[0]?.delta?.tool_calls, undefined);
    text += chunk.choices[0]?.delta?.content ?? '';
  }
  assert.equal(text, mockText);
});

test('errors by class', async () => {
  const c = client();
  const unknown = await refused(c.chat.completions.create(ask('gpt-9', 'Hello')), OpenAI.NotFoundError, 404);
  assert.equal(unknown.code, 'model_not_found');
  await refused(c.chat.completions.create(ask('gpt-9', 'Hello', { stream: true })), OpenAI.NotFoundError, 404);
  const empty = await refused(c.chat.completions.create({ model: 'helper', messages: [] }), OpenAI.BadRequestError, 400);
  assert.match(empty.param, /^messages/);
  const several = await refused(c.chat.completions.create(ask('helper', 'Hello', { n: 2 })), OpenAI.BadRequestError, 400);
  assert.equal(several.param, 'n');
  const tools = [{ type: 'function', function: { name: 'mine', parameters: { type: 'object' } } }];
  const own = await refused(c.chat.completions.create(ask('helper', 'Hello', { tools })), OpenAI.BadRequestError, 400);
  assert.equal(own.code, 'unsupported_parameter');
});

test('keys', async () => {
  await refused(client(PERDURE_AUTH_URL).chat.completions.create(ask('demo', 'Hello')), OpenAI.AuthenticationError, 401);
  const res = await client(PERDURE_AUTH_URL, { apiKey: PERDURE_AUTH_KEY }).chat.completions.create(ask('demo', 'Hello'));
  assert.match(res.choices[0].message.content, /Hello/);
});

test('overload, and the client\'s own retries', async () => {
  const c = client(PERDURE_BUSY_URL);
  const stream = await c.chat.completions.create(ask('demo', '/words 60', { stream: true }));
  const reader = stream[Symbol.asyncIterator]();
  assert.equal((await reader.next()).done, false);
  const err = await refused(c.chat.completions.create(ask('demo', 'me too')), OpenAI.RateLimitError, 429);
  assert.ok(Number(err.headers.get('retry-after')) >= 1, `Retry-After: ${err.headers.get('retry-after')}`);
  const patient = c.chat.completions.create(ask('demo', 'I can wait'), { maxRetries: 8 });
  let finish;
  for (let r = await reader.next(); !r.done; r = await reader.next()) finish = r.value.choices[0]?.finish_reason ?? finish;
  assert.equal(finish, 'stop', 'the accepted turn must finish');
  assert.match((await patient).choices[0].message.content, /I can wait/);
});

test('an aborted stream leaves a turn that goes on', async () => {
  const stop = new AbortController();
  const stream = await client().chat.completions.create(ask('demo', '/words 30', { stream: true }), inSession('node-left', { signal: stop.signal }));
  let chunks = 0;
  for await (const _ of stream) {
    if (++chunks !== 3) continue;
    const session = await (await fetch(`${PERDURE_URL}/v1/sessions/node-left`)).json();
    assert.equal(session.status, 'running', 'the first words must come while the turn runs');
    stop.abort(); // the client ends the loop quietly
  }
  assert.ok(chunks < 20, `${chunks} chunks after an abort at the third`);
  await eventually('the whole answer in the transcript', async () => {
    const ms = await transcript('node-left');
    return ms.length === 2 && !ms[1].partial && ms[1].message.content.split(' ').length >= 30;
  });
});

test('an aborted request that is not streamed', async () => {
  const stop = new AbortController();
  const call = client().chat.completions.create(ask('demo', '/words 30'), inSession('node-left-whole', { signal: stop.signal }));
  await eventually('the turn', async () => (await fetch(`${PERDURE_URL}/v1/sessions/node-left-whole`)).status === 200);
  stop.abort();
  await assert.rejects(call, OpenAI.APIUserAbortError);
  await eventually('the answer in the transcript', async () => (await transcript('node-left-whole')).length === 2);
});
