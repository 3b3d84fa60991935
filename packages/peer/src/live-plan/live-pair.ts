import { rankGeometry } from "@kv/fleet";
import type { SideChannel } from "@kv/interface";
import type { Pair } from "@kv/kv-plan";
import type { RankGeometry } from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";
import { type GivenGroups, groupKinds, kindsOf } from "../protocol/cache-groups.js";
import { readRankMetadata, type SideChannelAddress } from "../protocol/remote-engine.js";

interface LiveEngine extends SideChannelAddress {
  readonly tpSize: number;
}

interface LivePairOptions {
  readonly sideChannel: SideChannel;
  readonly prefill: LiveEngine;
  readonly decode: LiveEngine;
  /** 1 for MLA. */
  readonly numKvHeads: number;
  readonly groups: GivenGroups | undefined;
  /** Default: one that lets blocks be cut by head and token. */
  readonly cacheDtype?: string | undefined;
  readonly timeoutMs: number;
}

/**
 * Asks only rank (0, 0) and assumes others to be like it: a missing rank stops a vLLM 0.33 listener
 * for good.
 *
 * @throws those of the side channel, `KV_WIRE_MALFORMED`; those of `groupKinds`.
 */
export async function livePair(options: LivePairOptions): Promise<Pair> {
  const { sideChannel, timeoutMs } = options;
  const prefill = await readRankMetadata(sideChannel, options.prefill, { timeoutMs });
  const decode = await readRankMetadata(sideChannel, options.decode, { timeoutMs });
  const told = 1 + Math.max(0, ...(prefill.metadata.regionGroupIds ?? []));
  const count = options.groups === undefined ? told : kindsOf(options.groups).length;
  const groups = groupKinds(prefill.metadata, count, options.groups);
  const hashes = [prefill.compatibilityHash, decode.compatibilityHash];
  return {
    title: `${nameOf(options.prefill)} → ${nameOf(options.decode)}`,
    numKvHeads: options.numKvHeads,
    groups,
    cacheDtype: options.cacheDtype,
    windowTokens: groups.map(() => undefined),
    prefill: ranksLike(prefill.metadata, options.prefill.tpSize),
    decode: ranksLike(decode.metadata, options.decode.tpSize),
    assumed: [
      "every rank is like rank (0, 0), the only one that was asked; all have rank 0's addresses",
      hashes[0] === hashes[1]
        ? "both engines run one model: their compatibility hashes are equal"
        : `both engines run one model, although their compatibility hashes differ (${hashes.map((hash) => hash?.slice(0, 12)).join(", ")}): as they are, D refuses the handshake`,
      ...(options.groups === undefined
        ? [`${groups.join(", ")} as the kinds of the groups (--config, --groups)`]
        : []),
      ...(options.cacheDtype === undefined
        ? [
            "a cache whose blocks can be cut by head and token, as they cannot with nvfp4 (--kv-cache-dtype)",
          ]
        : []),
    ],
  };
}

export function ranksLike(metadata: AgentMetadata, tpSize: number): RankGeometry[] {
  return Array.from({ length: tpSize }, (_, tpRank) => ({
    ...rankGeometry(metadata, { tpRank, tpSize }),
    deviceId: tpRank,
  }));
}

function nameOf({ host, port }: LiveEngine): string {
  return `${host}:${port}`;
}
