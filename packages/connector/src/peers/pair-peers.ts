import type { Clock, Log } from "@kv/interface";
import { createPeers, type Peers, type PeersOptions } from "./peer-table.js";
import type { PairSettings } from "../config/connector-settings.js";
import type { TransferMetrics } from "../metrics/transfer-metrics.js";

export interface PairPeersOptions<Peer> extends Pick<PeersOptions<Peer>, "open" | "close"> {
  readonly clock: Clock;
  readonly log: Log;
  readonly metrics: TransferMetrics;
  readonly settings: Pick<PairSettings, "engineTtlMs">;
  /** vLLM's name of a handshake that failed. */
  readonly failureType: string;
}

/** Remote engines; a handshake that fails is counted and logged once, however many requests wait for it. */
export function createPairPeers<Peer>(options: PairPeersOptions<Peer>): Peers<Peer> {
  const { clock, log, metrics } = options;
  return createPeers<Peer>({
    clock,
    log,
    engineTtlMs: options.settings.engineTtlMs,
    async open(address) {
      try {
        return await options.open(address);
      } catch (error) {
        metrics.handshakeFailed();
        const { engineId, host, port } = address;
        log.warn(options.failureType, { engineId, host, port, error: String(error) });
        throw error;
      }
    },
    close: options.close,
  });
}
