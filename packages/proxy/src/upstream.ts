import { KvError } from "@kv/interface";
import { Agent, type Dispatcher } from "undici";
import { createBodyQueue, type UnreadBody } from "./body-queue.js";
import type { Ending } from "./ending.js";

export type Role = "prefill" | "decode";

/** How far a leg had come when it failed. At `connect` nothing of the request has left the proxy; `status` is an answer of 500 and more. */
export type FailureStage = "connect" | "answer" | "body" | "status";

export interface UpstreamRequest {
  readonly role: Role;
  /** The instance's base URL. */
  readonly url: string;
  readonly method: "GET" | "POST";
  readonly path: string;
  readonly headers: Readonly<Record<string, string | string[]>>;
  readonly body?: string;
  /** The request is to end early; `ending.signal` is it as an `AbortSignal`. */
  readonly ending: Ending;
  /** Called when the request begins to leave; before that nothing of it has. */
  readonly onSent?: () => void;
}

export interface UpstreamAnswer {
  readonly status: number;
  readonly headers: Readonly<Record<string, string | string[] | undefined>>;
  /** Bytes as they arrive; reading them is what lets more come. Errors: `KV_PROXY_UPSTREAM_FAILED` at stage `body`. */
  readonly body: UnreadBody;
  /** Ends the connection, unless the body has been read to its end. */
  discard(): void;
}

/** How the proxy speaks to instances. */
export interface Upstream {
  /** Resolves with the head of the answer. Errors: `KV_PROXY_UPSTREAM_FAILED` with `details.stage`. */
  send(request: UpstreamRequest): Promise<UpstreamAnswer>;
  close(): Promise<void>;
}

/** HTTP/1.1 with kept connections. Time limits other than the one to connect are the caller's, by `ending`. */
export function createHttpUpstream({ connectMs }: { connectMs: number }): Upstream {
  const agent = new Agent({
    connect: { timeout: connectMs },
    headersTimeout: 0,
    bodyTimeout: 0,
    maxHeaderSize: 64 * 1024,
    maxOrigins: Number.POSITIVE_INFINITY,
  });
  const targets = new Map<string, { origin: string; prefix: string }>();
  function target(url: string) {
    let known = targets.get(url);
    if (known === undefined) {
      const { origin, pathname } = new URL(url);
      known = { origin, prefix: pathname === "/" ? "" : pathname };
      targets.set(url, known);
    }
    return known;
  }
  return {
    send: (request) =>
      new Promise((resolve, reject) => {
        const { origin, prefix } = target(request.url);
        const { ending } = request;
        const queue = createBodyQueue();
        let controller: Dispatcher.DispatchController | undefined;
        let stage: BrokenStage = "connect";
        let over = false;
        const stop = () => controller?.abort(new Error("given up"));
        const finish = () => {
          over = true;
          forget();
        };
        const fail = (cause: unknown) => {
          if (over) return;
          finish();
          const error = failure(request, stage, cause);
          if (stage === "body") queue.fail(error);
          else reject(error);
        };
        const giveUp = () => {
          stop();
          // A request that still waits for its connection ends at once; the connection is refused to it later.
          if (stage === "connect") fail(new Error("given up"));
        };
        let forget = () => {};
        if (ending.ended) {
          fail(new Error("given up"));
          return;
        }
        forget = ending.onEnd(giveUp);
        const method = request.method;
        const options = { origin, path: prefix + request.path, method, headers: request.headers };
        agent.dispatch(
          { ...options, body: request.body ?? null },
          {
            onRequestStart(started) {
              controller = started;
              if (over) started.abort(new Error("given up"));
              else {
                stage = "answer";
                request.onSent?.();
              }
            },
            onResponseStart(_controller, status, headers) {
              if (status < 200) return;
              stage = "body";
              resolve({
                status,
                headers,
                body: queue.body,
                discard: () => {
                  if (!over) stop();
                },
              });
            },
            onResponseData: (flow, chunk) => queue.push(chunk, flow),
            onResponseEnd() {
              if (over) return;
              finish();
              queue.end();
            },
            onResponseError: (_controller, cause) => fail(cause),
          },
        );
      }),
    close: () => agent.destroy(),
  };
}

type BrokenStage = Exclude<FailureStage, "status">;

const WHAT = {
  connect: "could not be reached",
  answer: "closed the connection before it answered",
  body: "closed the connection in the middle of its answer",
} as const satisfies Record<BrokenStage, string>;

function failure({ role, url, path }: UpstreamRequest, stage: BrokenStage, cause: unknown): KvError {
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
  return STAGES.find((known) => known === stage);
}

const STAGES: readonly FailureStage[] = ["connect", "answer", "body", "status"];
