import { KvError } from "@kv/interface";

export interface HttpRequest {
  readonly method?: "GET" | "POST";
  readonly body?: unknown;
  readonly headers?: Readonly<Record<string, string>>;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal;
}

export interface HttpAnswer {
  readonly status: number;
  readonly text: string;
  readonly headers: Headers;
}

/** An answer with block ids of a long prompt, or `/metrics` of a busy server, is some hundred KB. */
const MAX_ANSWER_BYTES = 32 << 20;

/**
 * One HTTP exchange on a connection of its own: vLLM closes idle ones after five seconds, which may be just when the next request
 * leaves. Errors: `KV_PROXY_UPSTREAM_FAILED` when there is no answer; the signal's reason.
 */
export async function exchange(url: string, request: HttpRequest): Promise<HttpAnswer> {
  const { method = "GET", body, headers, timeoutMs, signal } = request;
  const limit = AbortSignal.timeout(timeoutMs);
  try {
    const response = await fetch(url, {
      method,
      headers: {
        connection: "close",
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...headers,
      },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      signal: signal === undefined ? limit : AbortSignal.any([limit, signal]),
    });
    return { status: response.status, text: await textOf(response, url), headers: response.headers };
  } catch (error) {
    if (KvError.is(error)) throw error;
    if (signal?.aborted === true) throw signal.reason;
    const why = limit.aborted ? `no answer within ${timeoutMs} ms` : reasonOf(error);
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${method} ${url}: ${why}`, {
      hint: "is the server up, and its HTTP port open to this host?",
      cause: error,
    });
  }
}

/** The answer as JSON. Errors: as `exchange`, and for any status but 200 with the beginning of what the server said. */
export async function exchangeJson(url: string, request: HttpRequest): Promise<unknown> {
  const { status, text } = await exchange(url, request);
  if (status !== 200) {
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${url} answered ${status}: ${text.slice(0, 300)}`, {
      details: { status },
    });
  }
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${url} answered 200 with what is not JSON`, {
      cause: error,
    });
  }
}

async function textOf(response: Response, url: string): Promise<string> {
  const chunks: Uint8Array[] = [];
  let length = 0;
  for await (const chunk of response.body ?? []) {
    const bytes = chunk as Uint8Array;
    length += bytes.byteLength;
    if (length > MAX_ANSWER_BYTES) {
      throw new KvError(
        "KV_PROXY_UPSTREAM_FAILED",
        `${url} answers with more than ${MAX_ANSWER_BYTES} bytes`,
      );
    }
    chunks.push(bytes);
  }
  return Buffer.concat(chunks).toString("utf8");
}

/** What `fetch` says is in the cause. */
function reasonOf(error: unknown): string {
  const cause = (error as { cause?: unknown }).cause;
  if (cause instanceof Error && cause.message !== "") return cause.message;
  return error instanceof Error ? error.message : String(error);
}
