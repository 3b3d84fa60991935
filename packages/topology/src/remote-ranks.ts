import { KvError } from "@kv/interface";
import { rankSequence } from "./rank-sequence.js";
import { requireInteger, requireRank } from "./required-integers.js";

/** This rank's place, and the sizes of the engine it faces. */
export interface EnginePair {
  readonly tpRank: number;
  readonly tpSize: number;
  readonly remoteTpSize: number;
  /** Ranks that share a sequence by decode context parallelism; 1 or `tpSize`. Default 1. */
  readonly dcpSize?: number;
  readonly remoteDcpSize?: number;
}

/**
 * Positive where the local engine has at least as many ranks: that many local ranks share a remote one. Negative where the remote has
 * more: a local rank faces that many. Errors: `KV_TOPOLOGY_INVALID` when neither size divides the other (vLLM 0.33, `TransferTopology.tp_ratio`).
 */
export function tpRatio(tpSize: number, remoteTpSize: number): number {
  requireInteger("tpSize", tpSize, 1);
  requireInteger("remoteTpSize", remoteTpSize, 1);
  if (tpSize % remoteTpSize !== 0 && remoteTpSize % tpSize !== 0) {
    throw new KvError(
      "KV_TOPOLOGY_INVALID",
      `local TP size ${tpSize} and remote TP size ${remoteTpSize} do not divide one another`,
      {
        hint: "choose tensor parallel sizes of which one is a multiple of the other",
        details: { tpSize, remoteTpSize },
      },
    );
  }
  return tpSize >= remoteTpSize ? tpSize / remoteTpSize : -(remoteTpSize / tpSize);
}

/** Remote ranks whose slice of the sequence overlaps this rank's, for MLA caches sharded over a remote DCP group. */
export function dcpSourceRanks(pair: EnginePair): number[] {
  const { tpRank, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 } = pair;
  requireDcp(pair);
  const dcpRank = tpRank % dcpSize;
  // A finer local split lies wholly within one remote slice.
  if (dcpSize > remoteDcpSize) return [dcpRank % remoteDcpSize];
  return rankSequence(0, remoteTpSize).filter((rank) => rank % dcpSize === dcpRank);
}

/** Remote ranks whose metadata this rank must have before it can plan: those it reads from, and those it only notifies. */
export function handshakeTargetRanks(pair: EnginePair): number[] {
  requireDcp(pair);
  if ((pair.remoteDcpSize ?? 1) > 1) return dcpSourceRanks(pair);
  return targetRemoteRanks(pair);
}

/** Remote ranks that share KV heads with this rank by tensor parallelism alone. */
export function targetRemoteRanks(pair: EnginePair): number[] {
  requireRank("tpRank", pair.tpRank, "tpSize", pair.tpSize);
  const ratio = tpRatio(pair.tpSize, pair.remoteTpSize);
  return rankSequence(Math.floor((pair.tpRank * pair.remoteTpSize) / pair.tpSize), Math.max(1, -ratio));
}

/**
 * Notifications that a remote rank awaits from all of its readers before it may free a request's blocks: the `n` of vLLM's
 * `"{request_id}:{n}"`.
 */
export function dcpConsumerCount(pair: EnginePair): number {
  const { tpSize, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 } = pair;
  requireDcp(pair);
  if (remoteDcpSize === 1) return Math.max(1, tpRatio(tpSize, remoteTpSize));
  // Where the local side is not sharded every local rank reads every slice.
  return dcpSize === 1 ? tpSize : Math.max(1, Math.floor(dcpSize / remoteDcpSize));
}

function requireDcp({ tpRank, tpSize, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 }: EnginePair): void {
  requireRank("tpRank", tpRank, "tpSize", tpSize);
  requireInteger("remoteTpSize", remoteTpSize, 1);
  requireInteger("dcpSize", dcpSize, 1);
  requireInteger("remoteDcpSize", remoteDcpSize, 1);
}
