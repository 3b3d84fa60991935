import { putLast } from "@kv/fleet/front-end";
import { overloaded } from "@kv/http";
import type { Clock } from "@kv/interface";

export interface AbandonedPrefillsOptions {
  readonly clock: Clock;
  /** Prefill time in ms that a client may abandon in 30 s. Infinity turns counting off. */
  readonly limitMs: number;
  /** Without a header, addresses name clients. */
  readonly clientHeader: string | undefined;
}

/** How long abandoned work counts. */
const WINDOW_MS = 30_000;
/** Beyond this number, the client that was quiet longest is forgotten. */
const MAX_CLIENTS = 10_000;
/** Abandoned work within this part of the window is summed. */
const PARTS_OF_WINDOW = 30;

/**
 * Limits prefill work that a client wastes by disconnecting before its answer begins; blocks may
 * then be held until a lease ends. Requests that cost no prefill time do not count.
 */
export class AbandonedPrefills {
  /** Each client's work, oldest first. The client that was quiet longest comes first. */
  readonly #byClient = new Map<string, { readonly atMs: number; workMs: number }[]>();

  constructor(private readonly options: AbandonedPrefillsOptions) {}

  /** @throws `KV_PROXY_OVERLOADED` (429) for a client that has abandoned too much. */
  check(client: string): void {
    const parts = this.#byClient.get(client);
    if (parts === undefined) return;
    const { clock, limitMs, clientHeader } = this.options;
    const nowMs = clock.now();
    let leftMs = 0;
    let workMs = 0;
    // Newest first: the client waits until the part that reaches the limit leaves the window.
    for (const part of parts.toReversed()) {
      if (part.atMs + WINDOW_MS <= nowMs) break;
      workMs += part.workMs;
      if (workMs < limitMs) continue;
      leftMs = part.atMs + WINDOW_MS - nowMs;
      break;
    }
    if (leftMs === 0) return;
    const seconds = (ms: number) => Math.round(ms / 100) / 10;
    throw overloaded({
      limit: "limits.abandonedPrefillMs",
      message:
        `prefill instances have worked ${seconds(workMs)} s for requests that ${clientHeader === undefined ? "this address" : `this client (${clientHeader})`} ` +
        `has left before their answers began, within ${WINDOW_MS / 1000} s; the limit is ${seconds(limitMs)} s`,
      byClient: true,
      retryAfterSeconds: Math.ceil(leftMs / 1000),
      hint:
        clientHeader === undefined
          ? "wait for answers; limits.abandonedPrefillMs sets the limit; where several clients have one address, limits.clientHeader names a header that tells them apart"
          : "wait for answers; limits.abandonedPrefillMs sets the limit",
    });
  }

  add(client: string, workMs: number): void {
    const { clock, limitMs } = this.options;
    if (limitMs === Number.POSITIVE_INFINITY || workMs === 0) return;
    const nowMs = clock.now();
    const parts = (this.#byClient.get(client) ?? []).filter(({ atMs }) => atMs + WINDOW_MS > nowMs);
    const last = parts.at(-1);
    if (last !== undefined && nowMs - last.atMs < WINDOW_MS / PARTS_OF_WINDOW)
      last.workMs += workMs;
    else parts.push({ atMs: nowMs, workMs });
    putLast(this.#byClient, client, parts, MAX_CLIENTS);
  }
}
