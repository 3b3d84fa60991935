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
  readonly onSent?: (() => void) | undefined;
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
        const call = new Call(request, resolve, reject);
        if (request.ending.ended) {
          call.giveUp();
          return;
        }
        const { origin, prefix } = target(request.url);
        const { method, path, headers, body = null } = request;
        call.watch();
        agent.dispatch({ origin, path: prefix + path, method, headers, body }, call);
      }),
    close: () => agent.destroy(),
  };
}

/** One request to an instance, from its begin to the last byte of its answer. A class, as every leg has one. */
class Call implements Dispatcher.DispatchHandler {
  readonly #request: UpstreamRequest;
  readonly #resolve: (answer: UpstreamAnswer) => void;
  readonly #reject: (error: KvError) => void;
  readonly #queue = createBodyQueue();
  #controller: Dispatcher.DispatchController | undefined = undefined;
  #stage: BrokenStage = "connect";
  #over = false;
  #unwatch: (() => void) | undefined = undefined;

  constructor(
    request: UpstreamRequest,
    resolve: (answer: UpstreamAnswer) => void,
    reject: (error: KvError) => void,
  ) {
    this.#request = request;
    this.#resolve = resolve;
    this.#reject = reject;
  }

  watch(): void {
    this.#unwatch = this.#request.ending.onEnd(() => this.giveUp());
  }

  giveUp(): void {
    this.#stop();
    // A request that still waits for its connection ends at once; the connection is refused to it later.
    if (this.#stage === "connect") this.#fail(new Error("given up"));
  }

  onRequestStart(controller: Dispatcher.DispatchController): void {
    this.#controller = controller;
    if (this.#over) {
      this.#stop();
      return;
    }
    this.#stage = "answer";
    this.#request.onSent?.();
  }

  onResponseStart(
    _controller: Dispatcher.DispatchController,
    status: number,
    headers: UpstreamAnswer["headers"],
  ): void {
    if (status < 200) return;
    this.#stage = "body";
    const discard = () => {
      if (!this.#over) this.#stop();
    };
    this.#resolve({ status, headers, body: this.#queue, discard });
  }

  onResponseData(controller: Dispatcher.DispatchController, chunk: Uint8Array): void {
    this.#queue.push(chunk, controller);
  }

  onResponseEnd(): void {
    if (this.#over) return;
    this.#finish();
    this.#queue.end();
  }

  onResponseError(_controller: Dispatcher.DispatchController, cause: unknown): void {
    this.#fail(cause);
  }

  #stop(): void {
    this.#controller?.abort(new Error("given up"));
  }

  #fail(cause: unknown): void {
    if (this.#over) return;
    this.#finish();
    const error = failure(this.#request, this.#stage, cause);
    if (this.#stage === "body") this.#queue.fail(error);
    else this.#reject(error);
  }

  #finish(): void {
    this.#over = true;
    this.#unwatch?.();
  }
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
