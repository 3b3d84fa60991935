import { KvError } from "@kv/interface";
import { Agent, type Dispatcher } from "undici";

export type Role = "prefill" | "decode";

/** How far a leg had come when it failed. At `connect` nothing of the request has left the proxy. */
export type FailureStage = "connect" | "answer" | "body";

export interface UpstreamRequest {
  readonly role: Role;
  /** The instance's base URL. */
  readonly url: string;
  readonly method: "GET" | "POST";
  readonly path: string;
  readonly headers: Readonly<Record<string, string | string[]>>;
  readonly body?: string;
  readonly signal: AbortSignal;
}

export interface UpstreamAnswer {
  readonly status: number;
  readonly headers: Readonly<Record<string, string | string[] | undefined>>;
  /** Bytes as they arrive; reading them is what lets more come. Errors: `KV_PROXY_UPSTREAM_FAILED` at stage `body`. */
  readonly body: AsyncIterator<Uint8Array, undefined>;
  /** Ends the connection, unless the body has been read to its end. */
  discard(): void;
}

/** How the proxy speaks to instances. */
export interface Upstream {
  /** Resolves with the head of the answer. Errors: `KV_PROXY_UPSTREAM_FAILED` with `details.stage`. */
  send(request: UpstreamRequest): Promise<UpstreamAnswer>;
  close(): Promise<void>;
}

/** HTTP/1.1 with kept connections. Time limits other than the one to connect are the caller's, by `signal`. */
export function createHttpUpstream({ connectMs }: { connectMs: number }): Upstream {
  const agent = new Agent({
    connect: { timeout: connectMs },
    headersTimeout: 0,
    bodyTimeout: 0,
    maxHeaderSize: 64 * 1024,
  });
  return {
    async send(request) {
      const { origin, pathname } = new URL(request.url);
      let answer: Dispatcher.ResponseData;
      try {
        answer = await agent.request({
          origin,
          path: `${pathname === "/" ? "" : pathname}${request.path}`,
          method: request.method,
          headers: request.headers,
          body: request.body ?? null,
          signal: request.signal,
        });
      } catch (cause) {
        throw failure(request, isConnectFailure(cause) ? "connect" : "answer", cause);
      }
      const { body } = answer;
      // Destroying a body that nobody reads emits an error, and one without a listener ends the process.
      body.on("error", () => {});
      return {
        status: answer.statusCode,
        headers: answer.headers,
        body: guarded(body[Symbol.asyncIterator](), (cause) => failure(request, "body", cause)),
        discard: () => void body.destroy(),
      };
    },
    close: () => agent.destroy(),
  };
}

function guarded(
  iterator: AsyncIterator<Uint8Array, undefined>,
  explain: (cause: unknown) => KvError,
): AsyncIterator<Uint8Array, undefined> {
  return {
    async next() {
      try {
        return await iterator.next();
      } catch (cause) {
        throw explain(cause);
      }
    },
  };
}

const CONNECT_CALLS = new Set(["connect", "getaddrinfo"]);

function isConnectFailure(cause: unknown): boolean {
  const { code, syscall, errors } = cause as { code?: unknown; syscall?: unknown; errors?: unknown };
  if (code === "UND_ERR_CONNECT_TIMEOUT") return true;
  if (typeof syscall === "string") return CONNECT_CALLS.has(syscall);
  // Several addresses were tried, as for "localhost".
  return Array.isArray(errors) && errors.length > 0 && errors.every(isConnectFailure);
}

const WHAT = {
  connect: "could not be reached",
  answer: "closed the connection before it answered",
  body: "closed the connection in the middle of its answer",
} as const satisfies Record<FailureStage, string>;

function failure({ role, url, path }: UpstreamRequest, stage: FailureStage, cause: unknown): KvError {
  const { code, message } = cause as { code?: unknown; message?: unknown };
  const why = typeof code === "string" ? code : String(message);
  return new KvError("KV_PROXY_UPSTREAM_FAILED", `the ${role} instance ${url} ${WHAT[stage]} (${why})`, {
    hint: stage === "connect" ? `is it running, and is ${url} right?` : `see the log of ${url}`,
    details: { role, instance: url, path, stage },
    cause,
  });
}

/** The stage of a failure that came from `Upstream`, undefined for any other error. */
export function failureStage(error: unknown): FailureStage | undefined {
  if (!KvError.is(error, "KV_PROXY_UPSTREAM_FAILED")) return undefined;
  const { stage } = error.details;
  return stage === "connect" || stage === "answer" || stage === "body" ? stage : undefined;
}
