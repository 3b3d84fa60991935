import { tpRatio } from "@kv/topology";
import { incompatible, invalidPlan } from "../errors.js";
import type { RankGeometry, StateSpaceGeometry } from "../geometry/rank-geometry.js";
import type { CacheKind, Piece, PieceContext } from "./cache-kind.js";

/**
 * A block of a state-space layer holds the projections of the convolution state, then the recurrent
 * state. Each is split evenly over the ranks, so each is a piece; logical blocks are never cut
 * along tokens. (vLLM 0.33, `_build_mamba_local`, `_build_mamba_remote`; its layout "DS", with
 * channels outside.)
 */
export const mamba: CacheKind = { name: "mamba", sharding: "state", extent: "state", pieces };

function pieces({ local, remote }: PieceContext): readonly Piece[] {
  const [mine, theirs] = [
    stateOf(local, "the local rank"),
    stateOf(remote, `remote rank ${remote.tpRank}`),
  ];
  const ratio = tpRatio(local.tpSize, remote.tpSize);
  // A local byte stands for `times / shares` remote bytes. More remote ranks each fill a share.
  const [times, shares] = ratio > 0 ? [ratio, 1] : [1, -ratio];
  requireScaled("convolution states", mine.convBytes, theirs.convBytes, times, shares);
  requireScaled("recurrent states", mine.recurrentBytes, theirs.recurrentBytes, times, shares);

  const projections = mine.convProjectionBytes ?? [mine.convBytes];
  // A short convolution has no recurrent state.
  const parts = mine.recurrentBytes === 0 ? projections : [...projections, mine.recurrentBytes];
  let localOffset = 0;
  return parts.map((bytes, index): Piece => {
    if (bytes % shares !== 0) {
      throw invalidPlan(`${bytes} bytes of state do not divide among ${shares} remote ranks`, {
        bytes,
        shares,
      });
    }
    const lengthBytes = bytes / shares;
    const begin = localOffset;
    const remoteBegin = (begin * times) / shares;
    localOffset += bytes;
    return {
      name: index < projections.length ? `conv ${index}` : "state",
      unit: "logical-block",
      localParts: 1,
      remoteParts: 1,
      lengthBytes,
      local: ({ stateIndex }) => ({
        offsetBytes: begin + stateIndex * lengthBytes,
        partStrideBytes: 0,
      }),
      remote: () => ({
        offsetBytes: remoteBegin + (local.tpRank % times) * lengthBytes,
        partStrideBytes: 0,
      }),
    };
  });
}

function stateOf(rank: RankGeometry, side: string): StateSpaceGeometry {
  const { stateSpace } = rank;
  if (stateSpace === undefined) {
    throw invalidPlan(
      `${side} has a state-space group, and the sizes of its states (ssm_sizes) are missing`,
    );
  }
  const sum = stateSpace.convProjectionBytes?.reduce((total, bytes) => total + bytes, 0);
  if (sum !== undefined && sum !== stateSpace.convBytes) {
    throw invalidPlan(
      `${side}: projections of ${stateSpace.convProjectionBytes?.join(" + ")} bytes do not add up to a convolution state of ${stateSpace.convBytes}`,
    );
  }
  return stateSpace;
}

function requireScaled(
  what: string,
  mine: number,
  theirs: number,
  times: number,
  shares: number,
): void {
  if (mine * times === theirs * shares) return;
  throw incompatible(
    `${what} do not have the sizes that TP sizes in the ratio ${times > 1 ? `1/${times}` : shares} imply`,
    mine,
    theirs,
  );
}

/**
 * Refuses a rank whose states do not fit into a logical block of the given regions (vLLM does not
 * check it). `side` is the subject of the message.
 *
 * @throws `KV_PLAN_INVALID`.
 */
export function requireStatesFit(
  side: string,
  rank: RankGeometry,
  regions: readonly number[],
): void {
  if (rank.stateSpace === undefined) return;
  const { convBytes, recurrentBytes } = rank.stateSpace;
  for (const index of regions) {
    const region = rank.regions[index];
    if (region === undefined) continue;
    const pageBytes = region.blockStrideBytes * rank.physicalBlocksPerLogical;
    if (convBytes + recurrentBytes <= pageBytes) continue;
    throw invalidPlan(
      `${side}, region "${region.name}": a state of ${convBytes} + ${recurrentBytes} bytes is larger than a logical block's ${pageBytes}`,
      { region: region.name, convBytes, recurrentBytes, pageBytes },
    );
  }
}
