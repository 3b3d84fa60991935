import { EventFrames, isDone } from "@kv/http";
import { KvError } from "@kv/interface";

export interface CompletionRequest {
  readonly url: string;
  readonly requestId: string;
  readonly promptTokens: readonly number[];
  readonly maxTokens: number;
  readonly zeroBlock?: number | undefined;
  readonly signal?: AbortSignal | undefined;
}

export interface CompletionOutcome {
  readonly requestId: string;
  readonly tokens: readonly number[];
  readonly ttftMs: number;
  readonly totalMs: number;
}

interface Event {
  readonly choices?: readonly { readonly token_ids?: readonly number[] }[];
  readonly error?: { readonly code?: string; readonly message?: string; readonly hint?: string };
}

/**
 * Streams one completion and measures the time to its first token.
 * @throws `KV_PROXY_UPSTREAM_FAILED` with the server's message.
 */
export async function complete(request: CompletionRequest): Promise<CompletionOutcome> {
  const { url, requestId, promptTokens, maxTokens, zeroBlock, signal } = request;
  const startMs = performance.now();
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-request-id": requestId },
    body: JSON.stringify({
      prompt: promptTokens,
      max_tokens: maxTokens,
      temperature: 0,
      ignore_eos: true,
      stream: true,
      return_token_ids: true,
      demo_zero_block: zeroBlock,
    }),
    signal: signal ?? null,
  });
  if (!response.ok || response.body === null)
    throw failure(requestId, response.status, await response.text());
  const tokens: number[] = [];
  let ttftMs = 0;
  let done = false;
  const frames = new EventFrames("utf8");
  for await (const chunk of response.body) {
    for (const event of frames.push(chunk)) {
      done ||= isDone(event);
      if (done || event.data === "") continue;
      const { error, choices } = JSON.parse(event.data) as Event;
      if (error !== undefined) throw failure(requestId, response.status, event.data);
      const made = choices?.[0]?.token_ids ?? [];
      if (made.length > 0 && tokens.length === 0) ttftMs = performance.now() - startMs;
      tokens.push(...made);
    }
  }
  if (!done)
    throw new KvError(
      "KV_PROXY_UPSTREAM_FAILED",
      `request ${requestId}: the response ended after ${tokens.length} tokens without [DONE]`,
    );
  return { requestId, tokens, ttftMs, totalMs: performance.now() - startMs };
}

function failure(requestId: string, status: number, body: string): KvError {
  let error: Event["error"];
  try {
    error = (JSON.parse(body) as Event).error;
  } catch {
    error = undefined;
  }
  const reason = error === undefined ? body.slice(0, 200) : `${error.code}: ${error.message}`;
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `request ${requestId} failed with HTTP ${status}: ${reason}`,
    { details: { status, code: error?.code }, hint: error?.hint },
  );
}
