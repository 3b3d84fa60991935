import type { Span, Tracer } from "@kv/interface";
import type { EngineAddress } from "../peers/engine-address.js";
import type { Peer, PeerRef } from "../peers/peer.js";
import type { PeerTable } from "../peers/peer-table.js";

/** Where a span goes: a tracer, if there is one, and the `traceparent` of the span's parent. */
export interface SpanPlace {
  /** Undefined: no span is recorded. */
  readonly tracer?: Tracer | undefined;
  /** Undefined begins a new trace. */
  readonly parent: string | undefined;
}

/** The `traceparent` as a member of a step's plain data: none where there is no trace, because plain data has no undefined members. */
export function traceMember(traceparent: string | undefined): { readonly traceparent?: string } {
  return traceparent === undefined ? {} : { traceparent };
}

/** As `table.acquire`, with a span `kv.handshake` where the peer is not open: a handshake, or the wait for one that another request began. */
export function acquireTraced<P extends Peer>(
  table: PeerTable<P>,
  address: EngineAddress,
  signal: AbortSignal | undefined,
  { tracer, parent }: SpanPlace,
): Promise<PeerRef<P>> {
  if (tracer === undefined || table.peek(address) !== undefined) return table.acquire(address, signal);
  const { engineId, host, port } = address;
  const span = tracer.start("kv.handshake", {
    parent,
    kind: "client",
    attributes: { "kv.remote_engine_id": engineId, "server.address": host, "server.port": port },
  });
  return endWith(span, table.acquire(address, signal));
}

/** Ends the span with the outcome of `work`. Returns `work`. */
export function endWith<T>(span: Span | undefined, work: Promise<T>): Promise<T> {
  if (span !== undefined)
    work.then(
      () => span.end(),
      (error: unknown) => span.end(error),
    );
  return work;
}

/** Runs `work` in a span, which ends with it. */
export function inSpan<T>(span: Span | undefined, work: () => T): T {
  try {
    const result = work();
    span?.end();
    return result;
  } catch (error) {
    span?.end(error);
    throw error;
  }
}
