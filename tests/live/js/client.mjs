// The official JavaScript client against a fleet: node client.mjs BASE_URL MODEL. Prints "ok" at the end.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Name a colour." }];
const greedy = { model, temperature: 0, max_tokens: 8 };

const whole = await client.chat.completions.create({ ...greedy, messages });
assert.equal(whole.object, "chat.completion");
assert.ok(whole.usage.completion_tokens <= 8);

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...greedy, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
// What was cached may differ the second time; what was counted may not.
assert.equal(usage.total_tokens, whole.usage.total_tokens);

const runner = client.chat.completions.stream({ ...greedy, messages });
assert.equal(await runner.finalContent(), text);

const many = await client.chat.completions.create({
  ...greedy, messages, n: 2, seed: 1, temperature: 1, logprobs: true, top_logprobs: 2,
});
assert.deepEqual(many.choices.map((choice) => choice.index), [0, 1]);
for (const choice of many.choices) {
  const bytes = choice.logprobs.content.flatMap((entry) => entry.bytes);
  assert.equal(Buffer.from(bytes).toString().startsWith(choice.message.content), true);
  assert.ok(choice.logprobs.content.every((entry) => entry.top_logprobs.length === 2));
}

const older = await client.completions.create({ ...greedy, prompt: "The sky is", echo: true, logprobs: 1 });
assert.ok(older.choices[0].text.startsWith("The sky is"));
assert.equal(older.choices[0].logprobs.tokens.length, older.usage.total_tokens);
let pieces = "";
for await (const chunk of await client.completions.create({ ...greedy, prompt: "The sky is", stream: true })) {
  pieces += chunk.choices[0].text;
}
assert.equal("The sky is" + pieces, older.choices[0].text);

const listed = [];
for await (const entry of client.models.list()) listed.push(entry.id);
assert.ok(listed.includes(model));
assert.equal((await client.models.retrieve(model)).object, "model");

await assert.rejects(client.chat.completions.create({ model: "gpt-9", messages }), (error) => {
  assert.ok(error instanceof OpenAI.NotFoundError);
  assert.equal(error.code, "model_not_found");
  return true;
});
await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.param, "temperature");
  return true;
});

const left = await client.completions.create({ ...greedy, prompt: "Once", max_tokens: 512, stream: true });
for await (const chunk of left) {
  assert.ok(chunk.id);
  left.controller.abort();
}
console.log("ok");
