import type { Agent, Transfer, TransferRequest } from "@kv/interface";
import type { PeerContext } from "../peers/remote-engine.js";
import type { SpanPlace } from "../tracing/spans.js";

/**
 * Turns the first failure of a request's transfers into the error of the request. `isStarted`: the
 * transfer had begun.
 */
export type TransferFailed = (error: unknown, isStarted: boolean) => unknown;

/** The transfers of one request. */
export interface RequestTransfers {
  /**
   * Starts a transfer, unless one has failed. Resolves when it touches memory no more; never
   * rejects.
   */
  start(request: TransferRequest, failed?: TransferFailed): Promise<void>;
  /** Fails the request for another reason. Only the first failure counts. */
  fail(error: unknown): void;
  /** Whether the request has failed. */
  readonly hasFailed: boolean;
}

/**
 * Runs the transfers that `run` starts for one request. One that fails makes the others useless:
 * they are aborted, and still waited for. Resolves when none of them touches memory any more.
 * Errors: the first failure.
 */
export async function transferAll(
  { agent, metrics, tracer }: Pick<PeerContext, "agent" | "metrics" | "tracer">,
  { signal, parent }: { readonly signal: AbortSignal; readonly parent: string | undefined },
  run: (transfers: RequestTransfers) => Promise<unknown>,
): Promise<void> {
  const abort = new AbortController();
  const onAbort = () => abort.abort(signal.reason);
  signal.addEventListener("abort", onAbort);
  let failure: { readonly error: unknown } | undefined;
  await run({
    get hasFailed() {
      return failure !== undefined;
    },
    fail(error) {
      failure ??= { error };
      abort.abort(error);
    },
    async start(request, failed = (error) => error) {
      if (failure !== undefined) return;
      const fail = (error: unknown, isStarted: boolean) => {
        failure ??= { error: failed(error, isStarted) };
        abort.abort(error);
      };
      try {
        const { done, released } = transferTraced(
          agent,
          { ...request, signal: abort.signal },
          { tracer, parent },
        );
        const ended = done.then(
          (result) => metrics.transferred(result),
          (error: unknown) => fail(error, true),
        );
        await Promise.all([ended, released]);
      } catch (error) {
        fail(error, false);
      }
    },
  });
  signal.removeEventListener("abort", onAbort);
  if (failure !== undefined) throw (failure as { readonly error: unknown }).error;
}

/**
 * As `agent.transfer`, with a span `kv.read` or `kv.write` from the start to the last byte: its
 * bytes, descriptors, the agent's first backend and the times that the transport measured.
 */
function transferTraced(
  agent: Pick<Agent, "transfer" | "backends">,
  request: TransferRequest,
  { tracer, parent }: SpanPlace,
): Transfer {
  const span = tracer?.start(request.operation === "READ" ? "kv.read" : "kv.write", {
    parent,
    attributes: { "kv.backend": agent.backends[0], "kv.remote_agent": request.remote.remote },
  });
  if (span === undefined) return agent.transfer(request);
  try {
    const transfer = agent.transfer(request);
    transfer.done.then(
      ({ lengthBytes, descriptorCount, mergedCount, prepareMs, postMs, transferMs }) => {
        span.set({
          "kv.bytes": lengthBytes,
          "kv.descriptors": descriptorCount,
          "kv.merged_descriptors": mergedCount,
          "kv.prepare_ms": prepareMs,
          "kv.post_ms": postMs,
          "kv.transfer_ms": transferMs,
        });
        span.end();
      },
      (error: unknown) => span.end(error),
    );
    return transfer;
  } catch (error) {
    span.end(error);
    throw error;
  }
}
