import { KvError } from "@kv/interface";
import { rankSequence } from "./rank-sequence.js";
import { requireInteger, requireRank } from "./required-integers.js";

/** A local rank, and the sizes of both engines. */
export interface EnginePair {
  /** Tensor-parallel rank of the local rank. */
  readonly tpRank: number;
  /** Tensor-parallel size of the local engine. */
  readonly tpSize: number;
  /** Tensor-parallel size of the remote engine. */
  readonly remoteTpSize: number;
  /** Local ranks that share a sequence by decode context parallelism (DCP). @default 1 */
  readonly dcpSize?: number | undefined;
  /** Remote ranks that share a sequence. @default 1 */
  readonly remoteDcpSize?: number | undefined;
}

/**
 * The ratio of two TP sizes (vLLM 0.33, `TransferTopology.tp_ratio`). Positive where the local
 * engine has at least as many ranks: the number of local ranks that share a remote rank. Negative
 * where the remote engine has more: the number of remote ranks of a local rank.
 * @throws `KV_TOPOLOGY_INVALID` when neither size divides the other.
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

/**
 * Remote ranks whose slice of the sequence overlaps the local rank's slice, for MLA caches that a
 * remote DCP group shares.
 */
function dcpSourceRanks(pair: EnginePair): number[] {
  const { tpRank, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 } = pair;
  requireDcp(pair);
  const dcpRank = tpRank % dcpSize;
  // A finer local split lies wholly within one remote slice.
  if (dcpSize > remoteDcpSize) return [dcpRank % remoteDcpSize];
  return rankSequence(0, remoteTpSize).filter((rank) => rank % dcpSize === dcpRank);
}

/**
 * Remote ranks that the local rank shakes hands with before it can plan: those it reads and those
 * it only notifies.
 *
 * @throws `KV_TOPOLOGY_INVALID` when TP sizes do not divide one another, or a number is out of
 * range.
 */
export function handshakeTargetRanks(pair: EnginePair): number[] {
  requireDcp(pair);
  if ((pair.remoteDcpSize ?? 1) > 1) return dcpSourceRanks(pair);
  return targetRemoteRanks(pair);
}

/**
 * The remote ranks that shake hands with the local rank: those that name it in their
 * `handshakeTargetRanks`. They are the ones that a P which pushes writes to, or only notifies.
 *
 * @throws As `handshakeTargetRanks`.
 */
export function handshakeSourceRanks(pair: EnginePair): number[] {
  const { tpRank, tpSize, remoteTpSize, dcpSize, remoteDcpSize } = pair;
  if ((dcpSize ?? 1) === 1 && (remoteDcpSize ?? 1) === 1) return targetRemoteRanks(pair);
  requireDcp(pair);
  const swapped = {
    tpSize: remoteTpSize,
    remoteTpSize: tpSize,
    dcpSize: remoteDcpSize,
    remoteDcpSize: dcpSize,
  };
  return rankSequence(0, remoteTpSize).filter((remote) =>
    handshakeTargetRanks({ tpRank: remote, ...swapped }).includes(tpRank),
  );
}

/**
 * Remote ranks that share KV heads with the local rank by tensor parallelism alone, ascending.
 *
 * @throws `KV_TOPOLOGY_INVALID` when TP sizes do not divide one another, or `tpRank` is not below
 * `tpSize`.
 */
export function targetRemoteRanks(pair: EnginePair): number[] {
  requireRank("tpRank", pair.tpRank, "tpSize", pair.tpSize);
  const ratio = tpRatio(pair.tpSize, pair.remoteTpSize);
  return rankSequence(
    Math.floor((pair.tpRank * pair.remoteTpSize) / pair.tpSize),
    Math.max(1, -ratio),
  );
}

/**
 * Notifications that a remote rank awaits from all of its readers before it frees a request's
 * blocks: the `n` of vLLM's `"{request_id}:{n}"`.
 *
 * @throws `KV_TOPOLOGY_INVALID` when TP sizes do not divide one another, or a number is out of
 * range.
 */
export function dcpConsumerCount(pair: EnginePair): number {
  const { tpSize, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 } = pair;
  requireDcp(pair);
  if (remoteDcpSize === 1) return Math.max(1, tpRatio(tpSize, remoteTpSize));
  // Where the local side is not sharded every local rank reads every slice.
  return dcpSize === 1 ? tpSize : Math.max(1, Math.floor(dcpSize / remoteDcpSize));
}

function requireDcp({
  tpRank,
  tpSize,
  remoteTpSize,
  dcpSize = 1,
  remoteDcpSize = 1,
}: EnginePair): void {
  requireRank("tpRank", tpRank, "tpSize", tpSize);
  requireInteger("remoteTpSize", remoteTpSize, 1);
  requireInteger("dcpSize", dcpSize, 1);
  requireInteger("remoteDcpSize", remoteDcpSize, 1);
}
