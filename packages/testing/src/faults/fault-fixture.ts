import type { Clock, ConnectorModule, KvTransferParams } from "@kv/interface";
import type { SeededRandom } from "@kv/transport-memory";
import type { SimRequest } from "../simulator/sim-options.js";

/** An engine of a fault run, wherever it lives. */
export interface FaultEngine {
  readonly engineId: string;
  readonly tpSize: number;
  readonly address: { readonly host: string; readonly port: number };
  prefill(request: SimRequest): Promise<KvTransferParams>;
  decode(request: SimRequest & { params: KvTransferParams; cachedTokens?: number }): Promise<void>;
  abort(requestId: string): void;
  outstanding(): Readonly<Record<string, number>> | Promise<Readonly<Record<string, number>>>;
  kill(): Promise<void>;
  close(): Promise<void>;
}

/** What to start: one engine at its seat. */
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

/** Where the engines of a fault run live, what moves their bytes, how time passes there, and what goes wrong by itself. */
export interface FaultFixture {
  readonly clock: Clock;
  start(order: FaultEngineOrder, random: SeededRandom): Promise<FaultEngine>;
  /** Sees work through: where time is virtual, by moving it on. */
  see<T>(work: Promise<T>): Promise<T>;
  /** Until these hold nothing, as far as they ever will: leases have run out by then. */
  rest(engines: readonly FaultEngine[]): Promise<void>;
  /** All engines are closed: what is held all the same. */
  end(): Promise<Readonly<Record<string, number>>>;
  /** What went wrong so far, by kind. */
  faultCounts(): Readonly<Record<string, number>>;
}
