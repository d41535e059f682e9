// Vercel's AI SDK in the ten turns, as play.py plays them. Standard input has `where`, `turns`, `tool`, `schema`,
// `weather`, `cutResult`; the only argument is the folder with node_modules.
import { createRequire } from 'node:module';
import { readFileSync } from 'node:fs';
import { isDeepStrictEqual } from 'node:util';
import { pathToFileURL } from 'node:url';

const { resolve } = createRequire(`${process.argv[2]}/`);
const load = (name) => import(pathToFileURL(resolve(name)));
const { generateText, streamText, tool, jsonSchema, Output } = await load('ai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');

const told = JSON.parse(readFileSync(0, 'utf8'));
const { where } = told;
const provider = createOpenAICompatible({
  name: 'specdec', baseURL: `${where.url}/v1`, apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true,
});
const { name, description, parameters } = told.tool.function;
const tools = { [name]: tool({ description, inputSchema: jsonSchema(parameters) }) };

function request(messages, option) {
  return {
    model: provider(where.model), messages, tools, temperature: 0, maxRetries: 0,
    ...(option === 'cut' && { maxOutputTokens: where.cut_tokens }),
    ...(option === 'schema' && { output: Output.object({ schema: jsonSchema(told.schema) }) }),
    ...(option === 'required' && { toolChoice: 'required' }),
    onError: () => {},
  };
}

function answer(text, toolCalls, thoughts, finishReason) {
  const isCut = finishReason === 'length';
  const calls = toolCalls.map((call) => (isCut || call.invalid ? null : call.input));
  return { content: text, calls, thoughts: thoughts ?? '', is_cut: isCut };
}

async function breakOff(messages, option) {
  const aborted = new AbortController();
  for await (const part of streamText({ ...request(messages, option), abortSignal: aborted.signal }).stream) {
    if (part.type === 'error') throw part.error;
    if (part.type.endsWith('-delta')) aborted.abort();
  }
}

async function streamed(messages, option) {
  const result = streamText(request(messages, option));
  return answer(await result.text, await result.toolCalls, await result.reasoningText, await result.finishReason);
}

const messages = [];
let calls = [];
for (const [user, option] of told.turns) {
  const value = (call) => (call.wrong ? told.cutResult : told.weather[call.input.city] ?? `unknown: ${call.input.city}`);
  if (calls.length > 0) {
    const content = calls.map((call) => ({
      type: 'tool-result', toolCallId: call.toolCallId, toolName: name, output: { type: 'text', value: value(call) },
    }));
    messages.push({ role: 'tool', content });
  }
  if (user) messages.push({ role: 'user', content: user });
  await breakOff(messages, option);
  const first = await streamed(messages, option);
  const result = await generateText(request(messages, option));
  const whole = answer(result.text, result.toolCalls, result.reasoningText, result.finishReason);
  if (!isDeepStrictEqual(first, whole)) throw new Error(`${JSON.stringify(first)} was streamed, ${JSON.stringify(whole)} came whole`);
  if (option === 'schema' && !isDeepStrictEqual(result.output, JSON.parse(whole.content))) throw new Error('the output is not parsed');
  // The library adds the result of an invalid call itself.
  messages.push(...result.response.messages);
  const answered = new Set(result.response.messages.flatMap((m) => (m.role === 'tool' ? m.content.map((c) => c.toolCallId) : [])));
  calls = result.toolCalls.map((call, at) => ({ ...call, wrong: whole.calls[at] === null })).filter((c) => !answered.has(c.toolCallId));
  console.log(JSON.stringify(whole));
}
