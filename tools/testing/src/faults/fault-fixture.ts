import type { Clock, ConnectorModule, KvTransferParams } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";
import type { SimRequest } from "../simulator/sim-options.js";

/** An engine of a fault run, in this process or elsewhere. */
export interface FaultEngine {
  readonly engineId: string;
  readonly tpSize: number;
  readonly address: { readonly host: string; readonly port: number };
  prefill(request: SimRequest): Promise<KvTransferParams>;
  decode(
    request: SimRequest & { params: KvTransferParams; cachedTokens?: number },
  ): Promise<unknown>;
  abort(requestId: string): void;
  outstanding(): Readonly<Record<string, number>> | Promise<Readonly<Record<string, number>>>;
  kill(): Promise<void>;
  close(): Promise<void>;
}

/** Options for the start of one engine. */
export interface FaultEngineOrder {
  readonly hostName: string;
  readonly engineId: string;
  readonly tpSize: number;
  readonly blockSize: number;
  readonly skewMs: number;
  readonly numBlocks: number;
  readonly layerwise: boolean;
  readonly extra: Readonly<Record<string, unknown>>;
  readonly receiveDeadlineMs: number;
  readonly loadFailurePolicy: "fail" | "recompute";
  readonly connector?: ConnectorModule;
  violation(what: string): void;
}

/**
 * Environment of a fault run: it starts the engines, and provides the transport, the clock, and the
 * injected faults.
 */
export interface FaultFixture {
  readonly clock: Clock;
  start(order: FaultEngineOrder, random: SeededRandom): Promise<FaultEngine>;
  /** Waits until the work is done. With a virtual clock, advances the clock. */
  settle<T>(work: Promise<T>): Promise<T>;
  /** Waits until these engines should hold nothing, because every lease has ended. */
  waitUntilIdle(engines: readonly FaultEngine[]): Promise<void>;
  /** Called after all engines are closed. Returns the counts of what is still held. */
  countHeld(): Promise<Readonly<Record<string, number>>>;
  /** Number of faults so far, by kind. */
  faultCounts(): Readonly<Record<string, number>>;
}
