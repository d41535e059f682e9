// Calls of this gateway, and their failures.

const LEAST_DELAY_S = 1;

/** A failed call, in words for the page's reader. `param` is the faulty field. */
export class Failure extends Error {
  constructor(message, { status = 0, param = null, delay = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.delay = delay;
  }
}

function headers(key) {
  const all = { "content-type": "application/json" };
  return key ? { ...all, authorization: `Bearer ${key}` } : all;
}

async function answered(path, key, options) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(key), cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /header/i.test(error.message)) {
      throw new Failure("The API key has characters that cannot be sent.", { param: "key" });
    }
    throw new Failure("The server cannot be reached. Is it running, and are you connected?");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch {
    // The answer is not this gateway's but a proxy's.
  }
  const said = told.message ?? `The server answered ${response.status}.`;
  const after = Number.parseFloat(response.headers.get("retry-after") ?? "");
  const delay = Number.isFinite(after) ? Math.max(LEAST_DELAY_S, Math.ceil(after)) : null;
  if (response.status === 401) {
    return new Failure(`The server requires a valid API key. It says: ${said}`, { status: 401, param: "key" });
  }
  if (response.status === 429 || response.status === 503) {
    const state = response.status === 429 ? "Too many requests." : "Not available now.";
    return new Failure(`${state} The server says: ${said}`, { status: response.status, delay: delay ?? LEAST_DELAY_S });
  }
  const isNamed = !told.param || said.includes(told.param);
  return new Failure(isNamed ? said : `${told.param}: ${said}`, { status: response.status, param: told.param ?? null });
}

/** Names of the served models. */
export async function models(key) {
  const response = await answered("v1/models", key, { method: "GET" });
  return (await response.json()).data.map((model) => model.id);
}

/** The events of a streamed answer. Throws Failure, or AbortError once `signal` fires. */
export async function* events(path, body, key, signal) {
  const response = await answered(path, key, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await next(reader, signal);
      if (done) throw lost();
      held += value;
      let end;
      while ((end = held.indexOf("\n\n")) >= 0) {
        const data = held.slice(0, end).replace(/^data: ?/, "");
        held = held.slice(end + 2);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Failure(event.error.message, { param: event.error.param });
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

async function next(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    throw lost();
  }
}

function lost() {
  return new Failure("The connection was lost before the end. The text so far is kept; generate again for the rest.");
}
