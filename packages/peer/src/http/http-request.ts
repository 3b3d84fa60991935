import { KvError } from "@kv/interface";
import type { z } from "zod";

interface HttpRequest {
  readonly method?: "GET" | "POST";
  readonly body?: unknown;
  readonly headers?: Readonly<Record<string, string>> | undefined;
  readonly timeoutMs: number;
  readonly signal?: AbortSignal | undefined;
}

/** Block ids of a long prompt, or busy `/metrics`, take some hundred KB. */
const MAX_RESPONSE_BYTES = 32 << 20;

/**
 * Uses a new connection: vLLM may close an idle one just when a request leaves.
 *
 * @throws `KV_PROXY_UPSTREAM_FAILED` when there is no answer, and for a redirect; the signal's
 * reason.
 */
export async function sendRequest(url: string, request: HttpRequest) {
  const { method = "GET", body, headers, timeoutMs, signal } = request;
  const timeout = AbortSignal.timeout(timeoutMs);
  try {
    const response = await fetch(url, {
      method,
      headers: {
        connection: "close",
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? null : JSON.stringify(body),
      redirect: "manual",
      signal: signal === undefined ? timeout : AbortSignal.any([timeout, signal]),
    });
    if (response.status >= 300 && response.status < 400) throw redirected(url, response);
    return { status: response.status, text: await readText(response, url) };
  } catch (error) {
    if (KvError.is(error)) throw error;
    if (signal?.aborted === true) throw signal.reason;
    const reason = timeout.aborted ? `no answer within ${timeoutMs} ms` : reasonOf(error);
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", `${method} ${url}: ${reason}`, {
      hint: "check that the server runs and that this host can reach its HTTP port",
      cause: error,
    });
  }
}

/**
 * @throws those of `sendRequest`; `KV_PROXY_UPSTREAM_FAILED` for any status but 200 and for a body
 * that is not `what`.
 */
export async function requestJson<T>(
  url: string,
  request: HttpRequest,
  schema: z.ZodType<T>,
  what: string,
): Promise<T> {
  const { status, text } = await sendRequest(url, request);
  if (status !== 200) {
    const message = `${url} answered ${status}: ${text.slice(0, 300)}`;
    throw new KvError("KV_PROXY_UPSTREAM_FAILED", message, { details: { status } });
  }
  const body = schema.safeParse(parseJson(text));
  if (body.success) return body.data;
  throw new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `${url} answered 200 with a body that is not ${what}`,
  );
}

/** Undefined for no JSON. */
export function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Prompts and parameters must reach only the server that the user named. */
function redirected(url: string, response: Response): KvError {
  void response.body?.cancel();
  const location = (response.headers.get("location") ?? "").slice(0, 300);
  return new KvError(
    "KV_PROXY_UPSTREAM_FAILED",
    `${url} answered ${response.status}, a redirect to ${JSON.stringify(location)}, which is not followed`,
    { hint: "give the address of the engine itself", details: { status: response.status } },
  );
}

async function readText(response: Response, url: string): Promise<string> {
  const chunks: Uint8Array[] = [];
  let length = 0;
  for await (const chunk of response.body ?? []) {
    const bytes = chunk as Uint8Array;
    length += bytes.byteLength;
    if (length > MAX_RESPONSE_BYTES) {
      throw new KvError(
        "KV_PROXY_UPSTREAM_FAILED",
        `${url} answered with more than ${MAX_RESPONSE_BYTES} bytes`,
      );
    }
    chunks.push(bytes);
  }
  return Buffer.concat(chunks).toString("utf8");
}

/** The message of a failed `fetch` is in its cause. */
function reasonOf(error: unknown): string {
  const cause = (error as { cause?: unknown }).cause;
  if (cause instanceof Error && cause.message !== "") return cause.message;
  return error instanceof Error ? error.message : String(error);
}
