import { KvError } from "@kv/interface";

/** A local rank, and the sizes of both engines. */
export interface EnginePair {
  readonly tpRank: number;
  readonly tpSize: number;
  readonly remoteTpSize: number;
  /** Local ranks that share a sequence by decode context parallelism (DCP). @default 1 */
  readonly dcpSize?: number | undefined;
  /** Remote ranks that share a sequence. @default 1 */
  readonly remoteDcpSize?: number | undefined;
}

/**
 * Returns the ratio of two TP sizes (vLLM 0.33, `TransferTopology.tp_ratio`): local ranks per
 * remote rank, or, negative, remote ranks per local one.
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

/** For MLA caches: remote ranks whose slice of the sequence overlaps the local one. */
function dcpSourceRanks(pair: EnginePair): number[] {
  const { tpRank, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 } = pair;
  requireDcp(pair);
  const dcpRank = tpRank % dcpSize;
  if (dcpSize > remoteDcpSize) return [dcpRank % remoteDcpSize];
  return rankSequence(0, remoteTpSize).filter((rank) => rank % dcpSize === dcpRank);
}

/**
 * Returns the remote ranks to shake hands with before planning: those to read and those only to
 * notify.
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
 * Returns the remote ranks whose `handshakeTargetRanks` name the local rank, to which a P pushes or
 * sends only notifications.
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
 * Returns the remote ranks that share KV heads with the local rank by tensor parallelism,
 * ascending.
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
 * Returns how many notifications a remote rank awaits before it frees a request's blocks: the `n`
 * of vLLM's `"{request_id}:{n}"`.
 *
 * @throws `KV_TOPOLOGY_INVALID` when TP sizes do not divide one another, or a number is out of
 * range.
 */
export function dcpConsumerCount(pair: EnginePair): number {
  const { tpSize, remoteTpSize, dcpSize = 1, remoteDcpSize = 1 } = pair;
  requireDcp(pair);
  if (remoteDcpSize === 1) return Math.max(1, tpRatio(tpSize, remoteTpSize));
  // Without local DCP every local rank reads every slice.
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

/** `Array.from` would cost more than the rest of a mapping. */
export function rankSequence(start: number, length: number): number[] {
  const ranks: number[] = [];
  for (let rank = start; rank < start + length; rank++) ranks.push(rank);
  return ranks;
}

/** @throws `KV_TOPOLOGY_INVALID`. */
export function requireInteger(name: string, value: number, minimum: number): void {
  if (Number.isSafeInteger(value) && value >= minimum) return;
  throw new KvError(
    "KV_TOPOLOGY_INVALID",
    `${name} must be an integer of at least ${minimum}, got ${value}`,
    { details: { name, value, minimum } },
  );
}

/** @throws `KV_TOPOLOGY_INVALID`. */
export function requireRank(name: string, rank: number, sizeName: string, size: number): void {
  requireInteger(sizeName, size, 1);
  requireInteger(name, rank, 0);
  if (rank < size) return;
  throw new KvError("KV_TOPOLOGY_INVALID", `${name} ${rank} is not below ${sizeName} ${size}`, {
    details: { [name]: rank, [sizeName]: size },
  });
}
